"""Parameters: where each tensor of a checkpoint goes.

A parameter is a plain tensor made of parts. Each part is one tensor of the checkpoint, of which this rank holds a
slice: `qkv` of rank 1 is the second half of the rows of `q`, `k` and `v`, one below the other. The loader reads parts,
so that sharding and merging are stated once, by the layer that owns the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.linear import QuantMethod
    from sglang.srt.plan.plan import Plan

Index: TypeAlias = tuple[int | slice, ...]


class Init(Enum):
    """What a dummy parameter holds."""

    NORMAL = "normal"
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor: its whole shape, the slice that this rank holds, and where in the parameter it goes."""

    shape: tuple[int, ...]
    source: tuple[slice, ...] = ()
    dest: Index = ()

    @property
    def sharded(self) -> bool:
        return any(s.indices(n)[:2] != (0, n) for s, n in zip(self.source, self.shape, strict=False))


@dataclass(frozen=True, slots=True)
class PartKey:
    """Names a part within its parameter; the fields fill the checkpoint name's template."""

    part: str = ""
    expert: int = 0


@dataclass(slots=True)
class Param:
    """`name` is a dotted path whose last piece (weight, bias) is the checkpoint's too."""

    name: str
    tensor: torch.Tensor
    parts: dict[PartKey, Part]
    init: Init = Init.NORMAL

    @property
    def sharded(self) -> bool:
        return any(part.sharded for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Scope:
    """What layers are built in: the plan, the place of the weights, and a path that names them."""

    plan: Plan
    device: torch.device
    dtype: torch.dtype
    tp_rank: int
    tp_size: int
    quant: QuantMethod
    path: str = ""
    params: dict[str, Param] = field(default_factory=dict)

    def sub(self, name: str | int) -> Scope:
        """The scope of a child; parameters land in the same collection."""
        path = f"{self.path}.{name}" if self.path else str(name)
        return Scope(self.plan, self.device, self.dtype, self.tp_rank, self.tp_size, self.quant, path, self.params)

    def param(
        self,
        leaf: str,
        shape: tuple[int, ...],
        parts: dict[PartKey, Part] | None = None,
        init: Init = Init.NORMAL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Allocate and record a parameter [shape]. Without `parts` it is one checkpoint tensor, held whole."""
        name = f"{self.path}.{leaf}"
        assert name not in self.params, f"parameter {name} exists already"
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.params[name] = Param(name, tensor, parts or {PartKey(): Part(shape)}, init)
        return tensor
