"""LoRA adapters of `kv_b_proj` in latent attention (MLA), which uses its halves W_UK and W_UV absorbed.

Of a head, whose rows of B are B_k and B_v, queries and outputs get

    q W_UK + (q B_k) A          attended W_UV + (attended A^T) B_v^T

so A lies in slots once for all heads, and B by head. To the kernels, which are those of experts, a head is an expert
that every token has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.adapters.files import AdapterPair
from sglang.srt.errors import UserError
from sglang.srt.layers.adapter_memory import AdapterMemory, HostAdapter
from sglang.srt.layers.moe.pair_adapters import Kernels
from sglang.srt.layers.native_adapters import ExpertAdapterWeights, empty_slot
from sglang.srt.plan.ranks import ShardRange


@dataclass(frozen=True, slots=True)
class LatentDims:
    """The heads of a rank and their sizes: queries without rotation, outputs, and the latent."""

    heads: ShardRange
    nope: int
    v: int
    rank: int


class LatentAdapters:
    """A and B of one layer's `kv_b_proj`, in slots."""

    def __init__(self, layers: AdapterMemory, kernels: Kernels, dims: LatentDims) -> None:
        self.layers, self.kernels, self.dims = layers, kernels, dims
        heads = dims.heads.padded_count
        self.first = len(layers.linears)
        self.keys = self._slots((heads, dims.nope), (1, dims.rank))
        self.values = self._slots((1, dims.rank), (heads, dims.v))

    def _slots(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> ExpertAdapterWeights:
        """Returns memory for one side. inputs, outputs: in how many heads they differ, and their number."""
        layers = self.layers
        plan, device, dtype = layers.plan, layers.device, layers.dtype
        weights = ExpertAdapterWeights(
            torch.zeros((plan.slots, inputs[0], 1, plan.room, inputs[1]), dtype=dtype, device=device),
            torch.zeros((plan.slots, *outputs, plan.room), dtype=dtype, device=device),
            layers.ranks[len(layers.linears)],
            torch.zeros(outputs[1], dtype=torch.int32, device=device),
            self.dims.heads.padded_count,
        )
        layers.linears.append(weights)
        return weights

    def add_to_queries(self, q: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Adds to absorbed queries [T, heads, rank] of q [T, heads, nope]."""
        self._add(q, absorbed, self.keys)

    def add_to_outputs(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Adds to outputs [T, heads, v] of attended latents [T, heads, rank]."""
        self._add(attended, out, self.values)

    def _add(self, x: torch.Tensor, out: torch.Tensor, weights: ExpertAdapterWeights) -> None:
        tokens = self.layers.tokens
        if tokens is None:
            return
        count, heads = x.shape[:2]
        assert count == len(tokens.slots), f"{count} rows of a step of {len(tokens.slots)} tokens"
        if heads not in tokens.by_head:
            ids = torch.arange(heads, dtype=torch.int32, device=x.device).repeat(count, 1)
            tokens.by_head[heads] = self.kernels.order(tokens.slots, ids, self.layers.plan.slots, heads)
        self.kernels.add(x.reshape(-1, x.shape[2]), out.view(-1, out.shape[2]), tokens.by_head[heads], weights)

    def check(self, module: str, pair: AdapterPair, source: str) -> None:
        """Raises UserError if the sizes of an adapter are not those of the layer."""
        dims = self.dims
        sizes = dims.heads.total * (dims.nope + dims.v), dims.rank
        if (pair.outputs, pair.inputs) != sizes:
            raise UserError(
                f"{source}: {module} is of [{pair.outputs}, {pair.inputs}], but the model's is of {[*sizes]}. Was the"
                " adapter made for another model?"
            )

    def put(self, adapter: HostAdapter, pair: AdapterPair, a: torch.Tensor, b: torch.Tensor, pinned: bool) -> None:
        """Puts this rank's heads of a file's A and B into an adapter."""
        run, rank, nope = self.dims.heads.run, pair.rank, self.dims.nope
        of_heads = b.unflatten(0, (self.dims.heads.total, -1))[run]
        mine = slice(0, self.dims.heads.count)
        (keys_a, keys_b), (values_a, values_b) = (
            empty_slot(side.a, side.b, pinned) for side in (self.keys, self.values)
        )
        keys_a[mine, 0, :rank] = of_heads[:, :nope].transpose(1, 2)
        keys_b[0, :, :rank] = a.T
        values_a[0, 0, :rank] = a
        values_b[mine, :, :rank] = of_heads[:, nope:]
        adapter.matrices[self.first], adapter.matrices[self.first + 1] = (keys_a, keys_b), (values_a, values_b)
        adapter.ranks[self.first : self.first + 2] = rank
        adapter.absorbs = True
