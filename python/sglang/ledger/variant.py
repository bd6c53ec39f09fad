"""One launch variant of a kernel, described so that it can be compiled without a GPU. Triton is not imported here: the
describing module provides the JITFunction `fn`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LAUNCH_ONLY = ("num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class Variant:
    """One launch variant. `op/key` is stable; with the tile it is unique. `signature` has every parameter of `fn` in
    order ("*bf16", "i32", "fp32", "constexpr"), `constexprs` the values of the last kind, `divisible_by_16` the
    parameters that the launcher would specialize that way."""

    op: str
    key: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...]
    tile: Mapping[str, int]
    """Includes num_warps and num_stages."""
    head_dims: tuple[int, int] = (0, 0)
    kv_dtype: str = ""
    """The type of the cache; empty where the op has none."""
    default: bool = True
    """False: a lower candidate of the table, for which spills are reported but not held against it."""
    native_only: bool = False
    """Needs matrix instructions that a compiler of `ledger.targets.NOT_NATIVE` does not have; not launched there."""
    ones: tuple[str, ...] = ()
    """Run-time numbers that are 1 in these launches, which Triton compiles in."""
    form_only: bool = False
    """Decides about no tile: on record because it is launched. Only where the lock is COMPLETE (`ledger.targets`)."""


def describe(
    op: str,
    key: str,
    fn: Any,
    types: Mapping[str, str],
    constexprs: Mapping[str, Any],
    launch: Mapping[str, int],
    divisible: tuple[str, ...] = (),
    ones: tuple[str, ...] = (),
) -> Variant:
    """Returns a variant. `types`: of the run-time parameters; `launch`: block sizes (constexprs) and warps. All
    pointers and the named `divisible` integers count as multiples of 16, and the named `ones` are 1."""
    tile = {"num_stages": 3, **launch}
    # With dependent launches a kernel has a few more instructions and costs the same.
    constants = (
        dict(constexprs)
        | ({"PDL": False} if "PDL" in fn.arg_names else {})
        | {name: value for name, value in launch.items() if name not in _LAUNCH_ONLY}
    )
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    assert all(name in constants for name, kind in signature.items() if kind == "constexpr"), f"{op}: {signature}"
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    packed = constants.get("KIND") == "mx" and constants.get("ELEMENT") == "e2m1"
    return Variant(op, key, fn, signature, constants, (*pointers, *divisible), tile, native_only=packed, ones=ones)
