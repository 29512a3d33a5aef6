"""Shared libraries with versioned symbols, as small as they can be: what dlopen and objdump judge.

Made with `as` and `ld` alone, which dpkg-dev brings: no compiler is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.hostlab.shell import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FABRIC: Final = {
    "FABRIC_1.0": ("fi_strerror", "fi_version"),
    "FABRIC_1.1": ("fi_fabric",),
    "FABRIC_1.2": ("fi_tostr",),
    "FABRIC_1.3": ("fi_getinfo",),
    "FABRIC_1.4": ("fi_tostr_r",),
    "FABRIC_1.5": ("fi_open",),
    "FABRIC_1.6": ("fi_log_ready",),
    "FABRIC_1.7": ("fi_getinfo", "fi_freeinfo", "fi_dupinfo"),
    "FABRIC_1.8": ("fi_getinfo", "fi_freeinfo", "fi_dupinfo"),
    "FABRIC_1.9": ("fi_getinfo", "fi_freeinfo", "fi_dupinfo"),
    "FABRIC_1.10": ("fi_getinfo", "fi_freeinfo", "fi_dupinfo"),
}
"""libfabric's symbol versions, oldest first, and what stands for their symbols here."""


def libfabric(target: Path, newest: str) -> None:
    """A libfabric.so.1 whose symbols end with the version `newest`."""
    names = list(FABRIC)
    versions = {name: FABRIC[name] for name in names[: names.index(newest) + 1]}
    default: dict[str, str] = {}
    for version, symbols in versions.items():
        default |= dict.fromkeys(symbols, version)
    lines = [".text"]
    script = []
    before = ""
    for version, symbols in versions.items():
        for symbol in symbols:
            label = f"{symbol}_{version.replace('.', '_')}"
            at = "@@" if default[symbol] == version else "@"
            lines += [f".globl {label}", f".type {label}, %function", f"{label}: ret"]
            lines += [f".symver {label}, {symbol}{at}{version}"]
        hidden = "" if before else " local: *;"
        script.append(f"{version} {{ global: {'; '.join(symbols)};{hidden} }}{before};")
        before = f" {version}"
    _link(target, lines, soname="libfabric.so.1", script=script)


def plain(target: Path, soname: str) -> None:
    """A library that can be loaded, and no more."""
    _link(target, [".text"], soname=soname)


def user_of(target: Path, soname: str, needs: Mapping[str, str], libraries: Sequence[Path]) -> None:
    """A plugin that takes `needs` (symbol -> version) from `libraries`, and is linked to all."""
    lines = [".text", ".globl nixl_plugin_init", ".type nixl_plugin_init, %function"]
    lines += ["nixl_plugin_init: ret", ".data"]
    for symbol, version in needs.items():
        lines += [f".symver {symbol}, {symbol}@{version}", f".quad {symbol}"]
    _link(target, lines, soname=soname, libraries=libraries)


def _link(
    target: Path,
    lines: Sequence[str],
    *,
    soname: str,
    script: Sequence[str] = (),
    libraries: Sequence[Path] = (),
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source, made = target.with_suffix(".s"), target.with_suffix(".o")
    source.write_text("\n".join((*lines, '.section .note.GNU-stack,"",%progbits', "")))
    run("as", "-o", made, source)
    options = ["-shared", "--no-as-needed", "-soname", soname, "-z", "noexecstack"]
    versions = target.with_suffix(".map")
    if script:
        versions.write_text("\n".join(script))
        options += ["--version-script", str(versions)]
    run("ld", *options, "-o", target, made, *libraries)
    for scratch in (source, made, versions):
        scratch.unlink(missing_ok=True)
