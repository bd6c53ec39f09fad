"""Token embedding and output projection, both sharded by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.layers.ops import LinearOp
from sglang.srt.layers.parameter import Part, Scope, Shard
from sglang.srt.layers.quantization.quantized_rows import values_of
from sglang.srt.plan.ranks import Share, exact_share, share_in_rooms, whole
from sglang.srt.plan.weight_names import PartKey


def _vocab_rows(group: Group, vocab_size: int) -> Share:
    """The rows of the vocabulary that a rank holds: the last ranks may hold fewer."""
    return share_in_rooms(vocab_size, -(-vocab_size // group.size), group.rank)


def _vocab_weight(scope: Scope, vocab_size: int, hidden_size: int) -> torch.Tensor:
    """This rank's rows [ceil(V / tp), H]. Rows past the vocabulary (of the last ranks) stay zero."""
    rows = _vocab_rows(scope.groups.tp, vocab_size)
    part = Part((vocab_size, hidden_size), (rows.run,), (slice(0, rows.count),))
    weight = scope.param("weight", (rows.room, hidden_size), {PartKey(): part})
    if not weight.is_meta:
        weight[rows.count :].zero_()
    return weight


class VocabParallelEmbedding:
    """ids [T] -> [T, H], times `scale` as the weight's type has it."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.scale = float(torch.tensor(scale, dtype=scope.dtype))
        self.group = scope.groups.tp
        self.weight = _vocab_weight(scope, vocab_size, hidden_size)
        self.first = self.group.rank * self.weight.shape[0]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._rows(ids)
        return out if self.scale == 1.0 else out * self.scale

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        out = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.group.all_reduce(out * mine[:, None])


class LMHead:
    """hidden [R, H] -> logits [R, V] fp32 on every rank, bent to within +-`cap` where it is not 0. Shares the
    embedding's weight when `tied_to` is given; otherwise a checkpoint may have it quantized."""

    def __init__(
        self,
        scope: Scope,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabParallelEmbedding | None = None,
        cap: float = 0.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.cap = cap
        self.group = scope.groups.tp
        rows = _vocab_rows(self.group, vocab_size)
        self.rows = rows.room
        shard = Shard("", exact_share(vocab_size, rows.run), whole(hidden_size))
        # The sums as they are: rounded to bf16, logits of 16 to 32 would lie on a grid of 0.125.
        self.product = scope.quant.create_head(scope, shard) if tied_to is None else None
        if self.product is None:
            weight = _vocab_weight(scope, vocab_size, hidden_size) if tied_to is None else tied_to.weight
            linear: LinearOp = scope.plan.entry("linear")
            self.product = lambda hidden: linear(values_of(hidden), weight, out_dtype=torch.float32)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.product is not None
        logits = self.product(hidden)
        if self.group.size > 1:
            missing = self.rows - logits.shape[-1]
            logits = F.pad(logits, (0, missing)) if missing else logits
            logits = self.group.all_gather(logits)[:, : self.vocab_size]
        return logits if self.cap == 0.0 else torch.tanh(logits / self.cap) * self.cap
