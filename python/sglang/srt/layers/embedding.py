"""Token embedding and output projection, both sharded by vocabulary."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.adapter_memory import StepTokens
from sglang.srt.layers.adapters import AdapterLayers, AdapterLinear
from sglang.srt.layers.ops import EMBEDDING_ROWS, LINEAR
from sglang.srt.layers.parameter import Init, Scope, TensorPart, WeightShard
from sglang.srt.layers.quantization.activations import values_of
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.plan.ranks import ShardRange, padded_share, whole
from sglang.srt.plan.weight_names import PartKey
from sglang.srt.sampling.sampling_params import NO_TOKEN


def _vocab_rows(group: Group, vocab_size: int) -> ShardRange:
    """Returns the vocabulary rows of a rank; the last ranks may hold fewer."""
    return padded_share(vocab_size, -(-vocab_size // group.size), group.rank)


def _vocab_weight(
    scope: Scope, vocab_size: int, hidden_size: int, stored: int = 0, on_host: bool = False
) -> torch.Tensor:
    """Returns this rank's rows [ceil(V / ranks), H]; rows past the vocabulary stay zero. stored: rows in checkpoints
    that pad the vocabulary; 0: without padding. Unpadded checkpoints are always accepted."""
    rows = _vocab_rows(scope.groups.vocabulary, vocab_size)
    part = TensorPart((vocab_size, hidden_size), (rows.run,), (slice(0, rows.count),))
    if stored > vocab_size:
        part = replace(part, shape=(stored, hidden_size), other=part)
    weight = scope.param("weight", (rows.padded_count, hidden_size), {PartKey(): part}, pinned=on_host)
    if not weight.is_meta:
        weight[rows.count :].zero_()
    return weight


class VocabParallelEmbedding:
    """Token embedding, ids [T] -> [T, H], times `scale` rounded to the weight's dtype. With `norm_eps` each row is
    normalized once after loading, without a norm weight; `plain` returns the original rows."""

    def __init__(
        self,
        scope: Scope,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
        norm_eps: float | None = None,
        stored: int = 0,
        on_host: bool = False,
    ) -> None:
        """stored: as in `_vocab_weight`. on_host: the rows lie in pinned host memory, where kernels read them."""
        self.scale = float(torch.tensor(scale, dtype=scope.dtype))
        self.group = scope.groups.vocabulary
        self.weight = _vocab_weight(scope, vocab_size, hidden_size, stored, on_host)
        self.lengths: torch.Tensor | None = None
        """[rows, 1] fp32: divisor of each normalized row."""
        if norm_eps is not None:
            self.lengths = torch.empty((len(self.weight), 1), dtype=torch.float32, device=scope.device)
            scope.finish.append(functools.partial(_norm_rows, self.weight, self.lengths, norm_eps))
        self.first = self.group.rank * self.weight.shape[0]
        self.adapters: AdapterLinear | None = None
        self.rows = scope.plan.entry(EMBEDDING_ROWS) if self.group.size > 1 or on_host else None

    def take_adapters(self, layers: AdapterLayers, module: str, vocab_size: int) -> None:
        """Takes memory for LoRA adapters, if `layers` has some for the embedding."""
        self.adapters = layers.embedding(module, _vocab_rows(self.group, vocab_size), self.weight, self.group)

    def multiply_by(self, scope: Scope) -> None:
        """Multiplies the rows, after loading, by the norm weight of this scope."""
        norm = scope.param("weight", (self.weight.shape[1],), init=Init.ONES)

        def multiply() -> None:
            self.weight.mul_(norm.to(self.weight.device))

        scope.finish.append(multiply)

    def __call__(self, ids: torch.Tensor, exchange: RowExchange | None = None) -> torch.Tensor:
        """Returns the rows of the tokens. exchange: gathers the tokens of ranks that share the vocabulary but have
        tokens of their own."""
        return self._scaled(self._rows(ids, exchange))

    def of_step(self, ids: torch.Tensor, exchange: RowExchange | None) -> torch.Tensor:
        """Returns the rows as a call does, each with its token's LoRA adapter."""
        if self.adapters is None:
            return self(ids, exchange)
        assert exchange is None, "attention groups take no adapters"
        return self._scaled(self._rows(ids, None, self.adapters))

    def _scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.scale == 1.0 else out * self.scale

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] for ids [T] as in the checkpoint: without the norm and the scale."""
        if self.lengths is None:
            return self._rows(ids, None)
        if self.rows is None:
            return _times(F.embedding(ids, self.weight), F.embedding(ids, self.lengths))
        rows = self.rows(ids, self.weight, self.first)  # zeros for the tokens of other ranks, whatever their lengths
        here = (ids - self.first).clamp(0, len(self.lengths) - 1)
        return self.group.all_reduce(_times(rows, F.embedding(here, self.lengths)), exact=True)

    def _rows(
        self, ids: torch.Tensor, exchange: RowExchange | None, adapters: AdapterLinear | None = None
    ) -> torch.Tensor:
        if adapters is not None:  # of this rank's tokens, before the sum over the ranks
            out = F.embedding(ids, self.weight) if self.rows is None else self.rows(ids, self.weight, self.first)
            adapters.look_up(ids, self.first, out)
            return out if self.group.size == 1 else self.group.all_reduce(out, exact=True)
        if self.rows is None:
            return F.embedding(ids, self.weight)
        if exchange is not None:
            exchange = replace(exchange, exact=True)
            return exchange.scatter(self.rows(exchange.gather(ids), self.weight, self.first), len(ids))
        return self.group.all_reduce(self.rows(ids, self.weight, self.first), exact=True)


NORMED_AT_ONCE = 1 << 14
"""Rows of an embedding that are normalized at once: 400 MB in fp32 for 6,656 columns."""


def _norm_rows(weight: torch.Tensor, lengths: torch.Tensor, eps: float) -> None:
    for rows, length in zip(weight.split(NORMED_AT_ONCE), lengths.split(NORMED_AT_ONCE), strict=True):
        wide = rows.float()
        squares = wide.square().mean(-1, keepdim=True) + eps
        rows.copy_(wide * torch.rsqrt(squares))
        length.copy_(squares.sqrt())


def _times(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns rows [T, H] times lengths [T, 1] fp32, in the dtype of the rows."""
    return (rows * lengths).to(rows.dtype)


MIN_SHARDED_ROWS = 16
"""Rows from which a step keeps logits sharded by vocabulary until it is known what is needed of them. Calculated, not
measured: gathering 16 rows of 151,936 columns over two ranks sends 4.9 MB to each of them."""


@dataclass(frozen=True, slots=True)
class RowShare:
    """This rank's share of a step's rows of logits, with complete columns, and the gathering of results computed from
    them."""

    group: Group
    logits: torch.Tensor  # [n, V] fp32
    rows: slice
    """The step's rows that these are; may be empty."""
    each: int
    """Rows per rank; the last ranks may have fewer."""
    count: int
    """Rows of the step."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers x [n, ...] of this rank's rows into [count, ...] of all rows. Collective."""
        padded = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, self.each - len(x)))
        return self.group.all_gather(padded, dim=0)[: self.count]


class LMHead:
    """The output head, hidden [R, H] -> logits [R, V] fp32 on every rank, times `scale`, and soft-capped to +-`cap` if
    that is not 0. Shares the embedding's weight if `tied_to` is given; otherwise its weight may be quantized."""

    def __init__(
        self,
        scope: Scope,
        vocab_size: int,
        tied_to: VocabParallelEmbedding | None = None,
        cap: float = 0.0,
        scale: float = 1.0,
        stored: int = 0,
    ) -> None:
        """stored: as in `_vocab_weight`."""
        hidden_size = scope.plan.weights.head.cols
        self.vocab_size = vocab_size
        self.cap, self.scale = cap, scale
        self.group = scope.groups.vocabulary
        rows = _vocab_rows(self.group, vocab_size)
        self.rows = rows
        shard = WeightShard("", rows, whole(hidden_size))
        # Logits are not rounded to bf16, where values from 16 to 32 would be multiples of 0.125.
        self.product = scope.quant.create_head(scope, shard) if tied_to is None else None
        if self.product is None:
            weight = _vocab_weight(scope, vocab_size, hidden_size, stored) if tied_to is None else tied_to.weight
            linear = scope.plan.entry(LINEAR)
            self.product = lambda hidden: linear(values_of(hidden), weight, out_dtype=torch.float32)
        self.adapters: AdapterLinear | None = None
        if scope.adapters is not None:
            self.adapters = scope.adapters.head(scope.module(), rows, hidden_size, self.product)

    def __call__(self, hidden: torch.Tensor, tokens: StepTokens | None = None) -> torch.Tensor:
        """tokens: those of the rows with LoRA adapters."""
        return self.whole(self._columns(hidden, tokens))

    def plain(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] without scale and cap."""
        assert self.product is not None
        return self.whole(self.product(hidden))

    def of_step(self, hidden: torch.Tensor, tokens: StepTokens | None = None) -> torch.Tensor:
        """Returns the logits as a call does, but with many rows only this rank's columns (`is_shard`)."""
        columns = self._columns(hidden, tokens)
        return columns if len(columns) >= MIN_SHARDED_ROWS else self.whole(columns)

    def _columns(self, hidden: torch.Tensor, tokens: StepTokens | None) -> torch.Tensor:
        """Returns this rank's columns [R, C]; those behind its vocabulary rows are padding."""
        assert self.product is not None
        logits = self.product(hidden)
        if tokens is not None and self.adapters is not None:
            self.adapters.add(values_of(hidden), logits, tokens)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap == 0.0 else torch.tanh(logits / self.cap) * self.cap

    def is_shard(self, logits: torch.Tensor) -> bool:
        """Returns whether the logits hold only this rank's columns."""
        return self.group.size > 1 and logits.shape[-1] < self.vocab_size

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns complete logits [R, V] on every rank, from a result of `of_step`. Collective."""
        if not self.is_shard(logits):
            return logits
        missing = self.rows.padded_count - logits.shape[-1]
        logits = F.pad(logits, (0, missing)) if missing else logits
        return self.group.all_gather(logits)[:, : self.vocab_size]

    def whole_share(self, shard: torch.Tensor, width: int) -> RowShare:
        """Exchanges sharded logits so that each rank gets complete rows for a share of the rows, which sends less than
        gathering all. Groups of `width` rows stay on one rank. Collective."""
        ranks, count = self.group.size, len(shard)
        each = -(-count // (width * ranks)) * width
        missing = self.rows.padded_count - shard.shape[-1]
        padded = F.pad(shard, (0, missing, 0, each * ranks - count))
        by_source = self.group.exchange(padded.view(ranks, each, -1))
        logits = by_source.movedim(0, 1).reshape(each, -1)[:, : self.vocab_size]
        first = min(self.group.rank * each, count)
        rows = slice(first, min(first + each, count))
        return RowShare(self.group, logits[: rows.stop - rows.start], rows, each, count)

    def first_largest(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the index [R] int64 of each row's first largest logit over all ranks, or NO_TOKEN as the sampler
        does. Sends eight bytes per row and rank. Collective."""
        if self.rows.count:
            mine = shard[:, : self.rows.count]
            tokens = mine.argmax(dim=-1, keepdim=True)  # of a NaN, if there is one
            scores = mine.gather(1, tokens)
        else:
            tokens = torch.zeros((len(shard), 1), dtype=torch.int64, device=shard.device)
            scores = torch.full_like(tokens, -torch.inf, dtype=torch.float32)
        ids = (tokens + self.rows.run.start).to(torch.int32)
        pairs = self.group.all_gather(torch.cat((scores.view(torch.int32), ids), dim=1), dim=0)
        by_rank = pairs.view(self.group.size, len(shard), 2)
        scores = by_rank[..., 0].view(torch.float32)
        first = scores.argmax(dim=0, keepdim=True)  # of equal ones the lowest rank, which has the lower tokens
        tokens = by_rank[..., 1].gather(0, first)[0].to(torch.int64)
        return torch.where(scores.gather(0, first)[0] > -torch.inf, tokens, NO_TOKEN)
