"""Linear products whose weights are held in the model's type, however the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import pad

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Param, Scope, WeightShard
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.quantization.layout import layout_of
from sglang.srt.layers.quantization.linear_weight import StoredWeight

Create = Callable[[Scope, list[WeightShard], ModuleQuant], StoredWeight]
"""Allocates tensors for shards as a checkpoint stores them."""


class DequantizedLinear:
    """A linear layer with weights dequantized after loading, x [T, in] -> [T, out] (+ bias) in x's dtype or
    `out_dtype`. Each shard is read as its own module is stored (None: in 16 bits), so the modules of a product may
    differ, and in whole groups of rows with one scale or word, of which a rank keeps its own. The stored form is
    freed."""

    def __init__(
        self,
        scope: Scope,
        shards: list[WeightShard],
        quants: list[ModuleQuant | None],
        create: Create,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.scope, self.bias, self.out_dtype = scope, bias, out_dtype
        self.linear = scope.plan.entry(LINEAR)
        self.stored: list[str] = []
        self.shards = [self._read(shard, quant, create) for shard, quant in zip(shards, quants, strict=True)]
        scope.finish.append(self.finish)

    def _read(self, shard: WeightShard, quant: ModuleQuant | None, create: Create) -> Callable[[], torch.Tensor]:
        """Allocates the tensors for one shard. Returns a function that returns its rows in the model's dtype."""
        scope, share = replace(self.scope, params={}), shard.rows
        if quant is None:
            tensor = Unquantized().stacked(scope, [shard])
            self._record(scope)
            return lambda: tensor
        groups = share.in_groups(max(1, quant.format.group[0], *_rows_of_words(quant)))
        weight = create(scope, [replace(shard, rows=groups)], quant)
        begin = share.run.start - groups.run.start
        self._record(scope)

        def rows() -> torch.Tensor:
            read = weight.dequantized()[begin : begin + share.count].to(scope.dtype)
            return pad(read, (0, 0, 0, share.padded_count - share.count))

        return rows

    def _record(self, scope: Scope) -> None:
        """Registers the shard's parameters under distinct names, since several shards have the same."""
        for param in scope.params.values():
            key = f"{param.name}.{len(self.stored)}"
            self.scope.params[key] = param
            self.stored.append(key)

    def finish(self) -> None:
        """Dequantizes and stacks the shards."""
        self.weight = torch.cat([rows() for rows in self.shards])
        for name in self.stored:
            del self.scope.params[name]
        self.shards.clear()
        name = f"{self.scope.path}.weight"
        self.scope.params[name] = Param(name, self.weight, {})

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.linear(values_of(x), self.weight, self.bias, out_dtype=self.out_dtype)


def _rows_of_words(quant: ModuleQuant) -> list[int]:
    """Returns the number of rows in one word of codes, and of zero points."""
    if quant.storage == "online" or quant.trellises:
        return []
    layout = layout_of(quant)
    return [leaf.rows for leaf in (layout.data, layout.zeros) if leaf is not None]
