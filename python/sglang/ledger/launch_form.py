"""Reads the form that Triton compiles for a launch, from Triton itself. Works without a GPU, on meta tensors.

    with recording("sm_120") as forms, named("linear", "fp8_block"):
        linear(torch.empty(4, 4096, device="meta"), ...)
    # forms: each with its types, constants and alignments, and the names that launches of it had

Triton derives a form from the arguments: the types of tensors and numbers, the values of constexprs, which pointers and
numbers are multiples of 16 and which numbers are 1. Two launches of one form run the same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.ledger.variant import Variant
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.noted_launches import NotLaunched, noted_launches
from sglang.srt.kernels.spec import Tile


@dataclass(frozen=True, slots=True)
class Form:
    """What Triton compiles for a launch. `types` by parameter as in Variant.signature, "constexpr" for those in
    `constants`. `multiples`: parameters that are multiples of 16. `ones`: run-time numbers that are 1, which Triton
    compiles in."""

    fn: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    multiples: frozenset[str]
    ones: frozenset[str]
    num_warps: int
    num_stages: int

    @property
    def kernel(self) -> str:
        """Returns "gemv.gemv_kernel": the module's last name and the function's."""
        return kernel_name(self.fn)

    def variant(self, op: str, key: str, default: bool = True) -> Variant:
        """Returns what Triton compiles for the launch, as a variant of this op and key."""
        tile = {name: value for name, value in self.constants if "BLOCK" in name}
        tile |= {"num_warps": self.num_warps, "num_stages": self.num_stages}
        multiples, ones = tuple(sorted(self.multiples)), tuple(sorted(self.ones))
        return Variant(op, key, self.fn, dict(self.types), dict(self.constants), multiples, tile, default, ones)

    def __str__(self) -> str:
        given = dict(self.constants)
        parts = [f"{name}={given[name]!r}" if name in given else f"{name}: {kind}" for name, kind in self.types]
        aligned = f"; multiples of 16: {', '.join(sorted(self.multiples))}" if self.multiples else ""
        ones = f"; ones: {', '.join(sorted(self.ones))}" if self.ones else ""
        return f"{self.kernel}({', '.join(parts)}; {self.num_warps} warps, {self.num_stages} stages{aligned}{ones})"


def kernel_name(fn: Any) -> str:
    """Returns a kernel's name in forms: module and function."""
    return f"{fn.fn.__module__.rpartition('.')[2]}.{fn.fn.__name__}"


def form_of(fn: Any, compile: Mapping[str, Any]) -> Form:
    """Returns the form of a launch from the arguments of `knobs.runtime.jit_cache_hook`: the kernel, and what Triton
    would compile."""
    names = fn.arg_names
    constants = {names[path[0]]: value for path, value in compile["constants"].items()}
    declared = {parameter.name for parameter in fn.params if parameter.is_constexpr}
    types = {name: "constexpr" if name in constants else kind for name, kind in compile["signature"].items()}
    # What Triton compiles in because of its value is a number that is 1, or None in place of a tensor.
    ones = frozenset(name for name, value in constants.items() if name not in declared and value is not None)
    for name in ones:
        types[name] = "i32"
    multiples = frozenset(
        names[path[0]]
        for path, attributes in compile["configs"][0].items()
        if any(list(attribute) == ["tt.divisibility", 16] for attribute in attributes)
    )
    return Form(
        fn,
        tuple(types.items()),
        tuple(sorted((name, value) for name, value in constants.items() if name not in ones)),
        multiples,
        ones,
        compile["num_warps"],
        compile["num_stages"],
    )


@dataclass(frozen=True, slots=True)
class RowName:
    """What the server calls a row when it looks for it: `pieces` of its key, the tile's name if it looks for that, and
    whether launches begin with that tile."""

    op: str
    pieces: tuple[str, ...]
    tile: str = ""
    default: bool = True


UNNAMED = RowName("", ())
Launches = dict[Form, set[RowName]]
"""The forms that were launched, in order, each with the names of its launches."""
_names = [UNNAMED]


@contextlib.contextmanager
def named(op: str, *pieces: str, tile: Tile | None = None, default: bool = True) -> Iterator[None]:
    """Names the launches in the block."""
    _names.append(RowName(op, pieces, "" if tile is None else tile_key(tile), default))
    try:
        yield
    finally:
        _names.pop()


@contextlib.contextmanager
def recording(arch: str) -> Iterator[Launches]:
    """Records Triton's launches in the block, as on `arch` ("sm_120"), without making them, as `noted_launches`
    does."""
    forms: Launches = {}
    with noted_launches(arch, lambda fn, compile: _Noted(forms.setdefault(form_of(fn, compile), set()))):
        yield forms


class _Noted(NotLaunched):
    """Stands for the compiled kernel of a recorded form, and collects the names of its launches."""

    def __init__(self, names: set[RowName]) -> None:
        self.names = names
        names.add(_names[-1])

    def launch_metadata(self, *launch: Any) -> None:
        self.names.add(_names[-1])
