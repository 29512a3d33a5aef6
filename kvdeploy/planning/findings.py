"""How checks say what they found, and how many of them become one list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from kvdeploy.model.reports import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvdeploy.model.spec import ClusterSpec, FleetSpec


Judged = TypeVar("Judged")

TLS_SOON_DAYS: Final = 14.0


def error(path: str, message: str, hint: str = "") -> Finding:
    return Finding(check="", severity=Severity.ERROR, path=path, message=message, hint=hint)


def warning(path: str, message: str, hint: str = "") -> Finding:
    return Finding(check="", severity=Severity.WARNING, path=path, message=message, hint=hint)


def fleets(spec: ClusterSpec) -> tuple[tuple[str, FleetSpec], ...]:
    """Both roles, each with its path."""
    return ("fleet.prefill", spec.fleet.prefill), ("fleet.decode", spec.fleet.decode)


def keys_unreadable(spec: ClusterSpec, *, exists: bool | None) -> Iterator[Finding]:
    """On whichever machine the router's keys are read."""
    if exists is False:
        yield error(
            "router.api_key_file",
            f"{spec.router.api_key_file} holds no keys that can be read",
            "Write one key a line into it; lines that start with # are comments.",
        )


def tls_unfit(problem: str | None) -> Iterator[Finding]:
    """On whichever machine the router's certificate is read."""
    if problem is not None:
        yield error(
            "router.tls_cert_file",
            problem,
            "Name a certificate chain and its key as PEM files, the key without a passphrase.",
        )


def tls_ending(spec: ClusterSpec, *, days_left: float | None) -> Iterator[Finding]:
    """Clients refuse a router whose certificate has ended."""
    if days_left is not None and days_left < TLS_SOON_DAYS:
        yield warning(
            "router.tls_cert_file",
            f"{spec.router.tls_cert_file} ends in {max(0.0, days_left):.1f} days",
            "Put a new one in its place, and run 'kvdeploy up': no request is dropped.",
        )


def check_id(check: Callable[..., object]) -> str:
    """What `--allow` calls a check."""
    return check.__name__.replace("_", "-")


def collect(
    checks: Iterable[Callable[[Judged], Iterator[Finding]]],
    judged: Judged,
    *,
    allow: frozenset[str],
) -> list[Finding]:
    """What the checks find, each under its check's id, worst first; without those in `allow`."""
    found = [
        replace(finding, check=check_id(check))
        for check in checks
        if check_id(check) not in allow
        for finding in check(judged)
    ]
    return sorted(found, key=lambda f: (-f.severity, f.path, f.check))


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop a run."""
    return [f for f in findings if f.severity >= Severity.ERROR]


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity; None when nothing was found."""
    return max((f.severity for f in findings), default=None)
