"""Checks that need only the cluster file and the catalog. Pure: no clock, disk or network.

A check is a generator named after the problem that it finds: its id is its name with dashes, its
docstring says why that is a problem. target_checks.py has those of one target alone;
machine_checks.py, operator_checks.py and aws_checks.py have those that need facts.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import BUILTIN_MODELS, TINY_MAX_LENGTH
from kvdeploy.model.routing import MODES, is_loopback
from kvdeploy.model.wording import did_you_mean
from kvdeploy.planning.aws_checks import AWS_CHECKS
from kvdeploy.planning.findings import (
    check_id,
    collect,
    error,
    errors_of,
    fleets,
    warning,
    worst,
)
from kvdeploy.planning.machine_checks import MACHINE_CHECKS, check_machine, memory_needed_gib
from kvdeploy.planning.operator_checks import AWS_CREDENTIALS, OPERATOR_CHECKS
from kvdeploy.planning.owned import ARGS, DECODE_SPLITS, ENV, arg_name
from kvdeploy.planning.target_checks import TARGET_CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec

__all__ = [
    "check_machine",
    "check_spec",
    "errors_of",
    "known_ids",
    "memory_needed_gib",
    "worst",
]

BUILTIN: Final = "builtin:"


def check_spec(spec: ClusterSpec, *, allow: frozenset[str] = frozenset()) -> list[Finding]:
    """Run every check but those whose id is in `allow`; worst first."""
    return collect(SPEC_CHECKS, spec, allow=allow)


def known_ids() -> frozenset[str]:
    """Every id that `allow` may hold."""
    return frozenset(
        {check_id(check) for check in SPEC_CHECKS}
        | {check_id(check) for check in MACHINE_CHECKS}
        | {check_id(check) for check in AWS_CHECKS}
        | {check_id(check) for check in OPERATOR_CHECKS}
        | {AWS_CREDENTIALS}
    )


# --- how the two sides fit together ----------------------------------------------------------
def prefill_wider_than_decode(spec: ClusterSpec) -> Iterator[Finding]:
    """A push writes each prefill rank's heads into decode ranks; it cannot gather them."""
    prefill, decode = spec.fleet.prefill.tensor_parallel, spec.fleet.decode.tensor_parallel
    if spec.connector.mode == "push" and prefill > decode:
        yield error(
            "fleet.prefill.tensor_parallel",
            f"{prefill} is more than decode's {decode}, which push cannot do",
            f"Set it to at most {decode}, or raise fleet.decode.tensor_parallel to {prefill}.",
        )


def decode_not_a_multiple_of_prefill(spec: ClusterSpec) -> Iterator[Finding]:
    """Every prefill rank must feed a whole number of decode ranks."""
    prefill, decode = spec.fleet.prefill.tensor_parallel, spec.fleet.decode.tensor_parallel
    if prefill <= decode and decode % prefill:
        good = ", ".join(str(n) for n in range(1, decode + 1) if decode % n == 0)
        yield error(
            "fleet.decode.tensor_parallel",
            f"{decode} is no multiple of prefill's {prefill}",
            f"With {decode} here, fleet.prefill.tensor_parallel may be {good}.",
        )


def decode_split(spec: ClusterSpec) -> Iterator[Finding]:
    """Push refuses a decode engine that is split by layers or by context."""
    if spec.connector.mode != "push":
        return
    for arg, value in spec.fleet.decode.engine_args.items():
        if arg_name(arg) in DECODE_SPLITS and value not in (1, "1"):
            yield error(
                f"fleet.decode.engine_args.{arg}",
                "decode engines cannot be split this way in push",
                "Leave it out, and use fleet.decode.tensor_parallel.",
            )


def lease_too_short(spec: ClusterSpec) -> Iterator[Finding]:
    """A lease that ends while decode queues: prefill frees the blocks, decode waits for ever."""
    lease, deadline = spec.connector.lease_s, spec.router.deadlines.prefill_s
    if lease < deadline:
        yield warning(
            "connector.lease_s",
            f"{lease:g} s is shorter than router.deadlines.prefill_s ({deadline:g} s): under load "
            "prefill frees the blocks while decode still queues, and the request is lost",
            f"Set it to {deadline:g} or more.",
        )


def router_ports_same(spec: ClusterSpec) -> Iterator[Finding]:
    """One of the two could not be listened on."""
    if spec.router.admin_port == spec.router.port:
        yield error(
            "router.admin_port",
            f"{spec.router.port} is router.port already",
            "Choose another port for one of them.",
        )


def router_mode_unfit(spec: ClusterSpec) -> Iterator[Finding]:
    """A leg of the other connector's kind ends decode's process."""
    mode, good = spec.router.mode, MODES[spec.connector.mode]
    if mode != "auto" and mode not in good:
        yield error(
            "router.mode",
            f"engines with connector.mode {spec.connector.mode} cannot do {mode}",
            f"Good values: auto, {', '.join(good)}.",
        )


# --- the model -------------------------------------------------------------------------------
def builtin_model_unknown(spec: ClusterSpec) -> Iterator[Finding]:
    """Only a few models are made by kvdeploy itself."""
    model = spec.model.id
    if model.startswith(BUILTIN) and model not in BUILTIN_MODELS:
        meant = did_you_mean(model, BUILTIN_MODELS).strip()
        known = f"Known: {', '.join(BUILTIN_MODELS)}."
        yield error("model.id", f"{model} is not a built-in model", meant or known)


def tiny_model_too_long(spec: ClusterSpec) -> Iterator[Finding]:
    """The tiny model knows only so many positions."""
    if spec.model.id == "builtin:tiny" and spec.model.max_length > TINY_MAX_LENGTH:
        yield error(
            "model.max_length",
            f"{spec.model.max_length} is more than the {TINY_MAX_LENGTH} of builtin:tiny",
            f"Set it to at most {TINY_MAX_LENGTH}.",
        )


def max_length_below_block(spec: ClusterSpec) -> Iterator[Finding]:
    """Without one full block in a prompt nothing of use is transferred."""
    block = spec.connector.block_size
    if spec.model.max_length < block:
        yield warning(
            "model.max_length",
            f"{spec.model.max_length} is less than one KV block (connector.block_size {block}): "
            "no prompt fills a block",
            f"Set it to at least {block}, or choose a smaller block.",
        )


def s3_model_on_local(spec: ClusterSpec) -> Iterator[Finding]:
    """Nothing fetches from S3 on a local target yet."""
    if spec.target == "local" and spec.model.id.startswith("s3://"):
        yield error(
            "model.id",
            "a model in S3 cannot be used with target local yet",
            "Copy it here, e.g. with 'aws s3 cp --recursive', and give its path.",
        )


# --- what belongs to kvdeploy ----------------------------------------------------------------
def engine_arg_taken(spec: ClusterSpec) -> Iterator[Finding]:
    """A flag that kvdeploy sets itself would have two values."""
    for path, fleet in fleets(spec):
        for arg in fleet.engine_args:
            use = ARGS.get(arg_name(arg))
            if use is not None:
                yield error(
                    f"{path}.engine_args.{arg}",
                    f"kvdeploy sets --{arg_name(arg)} itself",
                    use.replace("ROLE", path),
                )


def engine_env_taken(spec: ClusterSpec) -> Iterator[Finding]:
    """A variable that kvdeploy sets itself would have two values."""
    runtime = (("runtime", spec.runtime.env),)
    for path, env in (*((path, fleet.env) for path, fleet in fleets(spec)), *runtime):
        for name in env:
            if name in ENV:
                use = ENV[name].replace("ROLE", path if path != "runtime" else "fleet.decode")
                yield error(f"{path}.env.{name}", f"kvdeploy sets {name} itself", use)


# --- who can reach what ----------------------------------------------------------------------
def router_open_without_keys(spec: ClusterSpec) -> Iterator[Finding]:
    """Whoever reaches the port can use the model."""
    router = spec.router
    if is_loopback(router.host) or router.api_key_file is not None:
        return
    message = f"{router.host} is reached from other machines, and no API keys are asked for"
    if router.allow_anonymous:
        yield warning("router.allow_anonymous", message, "Set router.api_key_file.")
    else:
        yield error(
            "router.host",
            message,
            "Set router.api_key_file, listen on 127.0.0.1, or say router.allow_anonymous: true.",
        )


def tls_incomplete(spec: ClusterSpec) -> Iterator[Finding]:
    """A certificate without its key, or a key without its certificate, serves nobody."""
    cert, key = ("router.tls_cert_file", "router.tls_key_file")
    if (spec.router.tls_cert_file is None) != (spec.router.tls_key_file is None):
        missing, given = (cert, key) if spec.router.tls_cert_file is None else (key, cert)
        yield error(missing, f"is needed beside {given}", "Name both, or neither for plain http.")


def cidr_wrong(spec: ClusterSpec) -> Iterator[Finding]:
    """A range that is no range is found by AWS only in the middle of a run."""
    for path, text in _cidrs(spec):
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            yield error(path, f"{text!r} is not a range of addresses", "Write e.g. 10.0.0.0/8.")
            continue
        if str(network) != text.lower():
            yield error(path, f"{text!r} is not the range's own name", f"Write {network}.")


def _cidrs(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    for i, text in enumerate(spec.aws.network.allowed_cidrs if spec.aws else ()):
        yield f"aws.network.allowed_cidrs[{i}]", text
    for i, text in enumerate(spec.aws.access.ssh_cidrs if spec.aws else ()):
        yield f"aws.access.ssh_cidrs[{i}]", text


SPEC_CHECKS: Final[tuple[Callable[[ClusterSpec], Iterator[Finding]], ...]] = (
    prefill_wider_than_decode,
    decode_not_a_multiple_of_prefill,
    decode_split,
    lease_too_short,
    router_mode_unfit,
    router_ports_same,
    builtin_model_unknown,
    tiny_model_too_long,
    max_length_below_block,
    s3_model_on_local,
    engine_arg_taken,
    engine_env_taken,
    router_open_without_keys,
    tls_incomplete,
    cidr_wrong,
    *TARGET_CHECKS,
)
