"""Chooses the kernel and tile for a need on a GPU, with a reason against every kernel that was not chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.spec import Choice, KernelSpec, Need, NoKernel, Rejection, Tile
from sglang.srt.kernels.tables import TABLES

OPTIONAL_PACKAGES = ("flashinfer", "sm120_sgl_kernel", "triton")


def installed_packages() -> frozenset[str]:
    """Returns those of OPTIONAL_PACKAGES that this Python could import, without importing them."""
    return frozenset(name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is not None)


def resolve(
    need: Need, arch: ArchTraits, ledger: Ledger, packages: frozenset[str], forced: str | None = None
) -> Choice:
    """Returns the first candidate of the op's table that can serve `need`. forced: a kernel's name, or its name in
    flags (`KernelSpec.asked_as`); no other kernel is chosen then. packages: as `installed_packages`. Raises NoKernel
    with the reasons against each candidate, and with `forced` also what would work."""
    candidates = TABLES[need.op]
    if forced is not None:
        return _resolve_forced(need, arch, ledger, packages, candidates, forced)
    rejected: list[Rejection] = []
    for spec in candidates:
        fit = _fit(spec, need, arch, ledger, packages)
        if isinstance(fit, Rejection):
            rejected.append(fit)
            continue
        later = [_not_chosen(other, spec, need, arch, packages) for other in candidates[candidates.index(spec) + 1 :]]
        return _choice(need, spec, fit, ledger, arch, (*rejected, *later))
    raise NoKernel(need, arch, tuple(rejected))


def _resolve_forced(
    need: Need,
    arch: ArchTraits,
    ledger: Ledger,
    packages: frozenset[str],
    candidates: Sequence[KernelSpec],
    forced: str,
) -> Choice:
    """Returns the first of the kernels called `forced` that can serve `need`. Raises NoKernel if none has that name, or
    none of them can serve."""
    fits = {spec.name: _fit(spec, need, arch, ledger, packages) for spec in candidates}
    works = tuple(name for name, fit in fits.items() if not isinstance(fit, Rejection))
    named = [spec for spec in candidates if forced in (spec.name, spec.asked_as)]
    if not named:
        reason = f"there is no such kernel; known: {', '.join(fits)}"
        raise NoKernel(need, arch, (Rejection(forced, (reason,)),), forced, works)
    spec = next((spec for spec in named if spec.name in works), named[0])
    fit = fits[spec.name]
    if isinstance(fit, Rejection):
        refused = tuple(fit for fit in (fits[spec.name] for spec in named) if isinstance(fit, Rejection))
        raise NoKernel(need, arch, refused, forced, works)
    others = tuple(_not_chosen(other, spec, need, arch, packages) for other in candidates if other is not spec)
    return _choice(need, spec, fit, ledger, arch, others, "asked for")


def _fit(
    spec: KernelSpec, need: Need, arch: ArchTraits, ledger: Ledger, packages: frozenset[str]
) -> Rejection | tuple[Tile, ...]:
    """Returns the tiles that fit, best first (empty for a kernel without tiles), or why the kernel cannot be used."""
    reasons = spec.why_not(need, arch, packages)
    if reasons or not spec.tiled:
        return Rejection(spec.name, tuple(reasons)) if reasons else ()
    fitting = ledger.fitting_tiles(need, arch)
    if not fitting.tiles:
        return Rejection(spec.name, tuple(fitting.reasons))
    return fitting.tiles


def _not_chosen(
    spec: KernelSpec, chosen: KernelSpec, need: Need, arch: ArchTraits, packages: frozenset[str]
) -> Rejection:
    """Returns why `spec` was not chosen: its own reasons, or that `chosen` comes before it."""
    reasons = spec.why_not(need, arch, packages)
    return Rejection(spec.name, tuple(reasons) or (f"{chosen.name} comes first",))


def _choice(
    need: Need,
    spec: KernelSpec,
    tiles: tuple[Tile, ...],
    ledger: Ledger,
    arch: ArchTraits,
    rejected: tuple[Rejection, ...],
    note: str | None = None,
) -> Choice:
    """Returns the choice of `spec`: the first of `tiles`, the others as fallbacks. note: as in `Choice`."""
    remark = spec.remark(need, arch)
    if not tiles:
        record = ledger.worst(need, arch) if spec.package == "triton" else None
        return Choice(need, spec, record=record, rejected=rejected, note=note, remark=remark)
    return Choice(need, spec, tiles[0], ledger.record(need, tiles[0], arch), tiles[1:], rejected, note, remark)
