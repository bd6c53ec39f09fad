"""The ranks that serve a model, and which of its dimensions each of them has. No torch.

Each of `pp_size` pipeline stages has `tp_size` contiguous ranks and a contiguous run of layers; the ranks of a stage
divide every layer of it. Experts may be divided in two ways at once: each of `ep_size` groups of contiguous ranks has
whole experts, and the ranks of a group divide the intermediate dims of theirs. Rank r of TP 4 x EP 2 belongs to expert
group r // 2 and has part r % 2 of its experts' dims. `dcp_size` contiguous ranks shard the tokens of caches that each
of them would otherwise hold whole: position p belongs to the rank with number p % dcp_size among them. Each of
`attn_dp_size` groups of contiguous ranks has requests of its own (data-parallel attention): the ranks of a group divide
the heads for its requests, and all ranks divide the rest of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The numbers of ranks by which a model is divided. `ep_size`, `dcp_size` and `attn_dp_size` divide `tp_size`.
    Methods about a stage take the rank within it (`tp_rank`)."""

    tp_size: int = 1
    ep_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    attn_dp_size: int = 1
    dp_lm_head: bool = False
    """True: the ranks of each attention group divide the vocabulary among them; False: all ranks do."""

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.tp_size * self.pp_size

    @property
    def leader(self) -> int:
        """The rank that answers requests: the first of the last stage, which samples."""
        return self.world_size - self.tp_size

    def stage(self, rank: int) -> int:
        """Returns the pipeline stage of a rank."""
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        """Returns the number of a rank within its stage."""
        return rank % self.tp_size

    def name(self, rank: int) -> str:
        """Names a rank for people: "PP1 TP0"."""
        stage = f"PP{self.stage(rank)} " if self.pp_size > 1 else ""
        return f"{stage}TP{self.tp_rank(rank)}"

    @property
    def attn_tp_size(self) -> int:
        """Number of ranks that share the heads of attention."""
        return self.tp_size // self.attn_dp_size

    @property
    def vocab_tp_size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return self.attn_tp_size if self.dp_lm_head else self.tp_size

    def attn_dp_rank(self, rank: int) -> int:
        """Returns the attention group of a rank."""
        return rank // self.attn_tp_size

    def attn_tp_rank(self, rank: int) -> int:
        """Returns the number of a rank within its attention group."""
        return rank % self.attn_tp_size

    @property
    def expert_tp_size(self) -> int:
        """Number of ranks that share the intermediate dims of an expert."""
        return self.tp_size // self.ep_size

    @property
    def flags(self) -> str:
        """Flags with which the user asks for this layout."""
        experts = f" --ep-size {self.ep_size}" if self.ep_size > 1 else ""
        stages = f" --pp-size {self.pp_size}" if self.pp_size > 1 else ""
        tokens = f" --dcp-size {self.dcp_size}" if self.dcp_size > 1 else ""
        requests = f" --attn-dp-size {self.attn_dp_size}" if self.attn_dp_size > 1 else ""
        vocabulary = " --enable-dp-lm-head" if self.dp_lm_head else ""
        return f"--tp-size {self.tp_size}{experts}{stages}{tokens}{requests}{vocabulary}"

    def ep_rank(self, rank: int) -> int:
        """Returns the expert group of a rank."""
        return rank // self.expert_tp_size

    def expert_tp_rank(self, rank: int) -> int:
        """Returns which part of its experts' intermediate dims a rank has."""
        return rank % self.expert_tp_size

    def context_rank(self, rank: int) -> int:
        """Returns the number of a rank among the DCP ranks that shard the tokens of caches."""
        return rank % self.dcp_size

    def padded_experts(self, num_experts: int) -> int:
        """Returns the number of whole experts that a rank has room for."""
        return -(-num_experts // self.ep_size)


ONE_RANK = RankLayout()


@dataclass(frozen=True, slots=True)
class Node:
    """One of the machines that a server runs on: number `rank` of `count`, with the layout of all ranks.

    machine 0    front, detokenizer, and the block of ranks that contains the leader
    machine n    the n-th block after that, wrapping around; nothing else
    """

    rank: int
    count: int
    layout: RankLayout
    first_gpu: int = 0
    """Index of the first rank's GPU on this machine."""

    @property
    def ranks(self) -> range:
        """The ranks that run here."""
        each = self.layout.world_size // self.count
        block = (self.layout.leader // each + self.rank) % self.count
        return range(block * each, (block + 1) * each)

    @property
    def answers(self) -> bool:
        """Returns whether clients are answered on this machine."""
        return self.rank == 0

    def device(self, rank: int) -> int:
        """Returns the index of a rank's GPU on its machine."""
        return self.first_gpu + rank - self.ranks.start

    @property
    def devices(self) -> range:
        """The GPUs of the ranks that run here."""
        return range(self.first_gpu, self.first_gpu + len(self.ranks))


@dataclass(frozen=True, slots=True)
class ShardRange:
    """One rank's run of `total` things (heads, rows, dims) that ranks divide. Every rank allocates `padded_count` of
    them; a shorter run is padded with zeros, which add nothing.

    `tp_block` > 0: the things are rows of a TP-interleaved checkpoint tensor, made of parts of `tp_block` rows each.
    Groups of rows with one scale begin anew in every part, and a run lies within one part.
    """

    total: int
    run: slice
    padded_count: int
    tp_block: int = 0

    @property
    def count(self) -> int:
        return int(self.run.stop - self.run.start)

    @property
    def padded(self) -> bool:
        return self.count < self.padded_count

    def scale_dims(self, dims: int) -> ShardRange:
        """Returns the share in dims, where each of the things has `dims` dims."""
        return ShardRange(
            self.total * dims, slice(self.run.start * dims, self.run.stop * dims), self.padded_count * dims
        )

    def among(self, count: int, index: int) -> ShardRange:
        """Returns the share within the `index`-th of `count` equal, concatenated runs of things."""
        begin = index * self.total
        return ShardRange(count * self.total, slice(begin + self.run.start, begin + self.run.stop), self.padded_count)

    @property
    def part(self) -> slice:
        """The TP block of the tensor that contains the run; the whole tensor without TP blocks."""
        if not self.tp_block:
            return slice(0, self.total)
        begin = self.run.start // self.tp_block * self.tp_block
        return slice(begin, begin + self.tp_block)

    def groups(self, per: int) -> tuple[int, slice]:
        """Returns the number of groups of `per` things in all, and the run of groups that cover this share."""
        part = self.part
        start, stop = self.run.start - part.start, self.run.stop - part.start
        each = -(-(part.stop - part.start) // per)
        first = part.start // (part.stop - part.start) * each if self.tp_block else 0
        count = each * (self.total // self.tp_block) if self.tp_block else each
        return count, slice(first + start // per, first - (-stop // per))

    def cuts(self, per: int) -> bool:
        """Returns whether the run begins or ends within a group of `per`."""
        part = self.part
        ends = {self.run.start, self.run.stop} - {part.stop}
        return any((end - part.start) % per for end in ends)

    def in_groups(self, per: int) -> ShardRange:
        """Returns the share extended to whole groups of `per` things, with room for exactly these."""
        part = self.part
        first = part.start + (self.run.start - part.start) // per * per
        last = min(part.start - (part.start - self.run.stop) // per * per, part.stop)
        return ShardRange(self.total, slice(first, last), -(-(last - first) // per) * per, self.tp_block)


def whole(total: int) -> ShardRange:
    """Returns the share of a rank that has all `total` things."""
    return ShardRange(total, slice(0, total), total)


def exact_share(total: int, run: slice) -> ShardRange:
    """Returns a share without padding."""
    return ShardRange(total, run, run.stop - run.start)


def padded_share(total: int, padded_count: int, rank: int) -> ShardRange:
    """Returns a rank's share where each rank has `padded_count` things and the last ones what is left, if anything."""
    return ShardRange(
        total, slice(min(rank * padded_count, total), min((rank + 1) * padded_count, total)), padded_count
    )


def share_of_units(total: int, unit: int, rank: int, size: int) -> ShardRange:
    """Returns a rank's share of `total` things in units of `unit` things, the last of which may be shorter. Where ranks
    do not divide the units, the first ranks have one more."""
    units = -(-total // unit)
    run = even_slice(units, rank, size)
    return ShardRange(total, slice(min(run.start * unit, total), min(run.stop * unit, total)), -(-units // size) * unit)


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The division of attention heads over `tp_size` ranks, each of which has at least one.

    A KV head stays with the query heads that attend to it; where ranks do not divide the KV heads, the first ranks have
    one more. With fewer KV heads than ranks each KV head is on several ranks, which divide its query heads.

    Example: 64 query heads and 8 KV heads over 3 ranks are 24, 24 and 16 with 3, 3 and 2; 32 and 4 over 6 ranks are 4,
    4, 8, 4, 4 and 8 with one each.
    """

    num_heads: int
    num_kv_heads: int
    tp_size: int

    @property
    def group(self) -> int:
        """Number of query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_kv_heads(self) -> int:
        """Most KV heads that a rank has."""
        return max(1, -(-self.num_kv_heads // self.tp_size))

    @property
    def padded_heads(self) -> int:
        """Most query heads that a rank has."""
        return self.padded_kv_heads * -(-self.group // max(1, self.tp_size // self.num_kv_heads))

    @property
    def kv_copies(self) -> int | None:
        """Number of ranks that hold the same KV head; None: the number differs between heads."""
        if self.tp_size <= self.num_kv_heads:
            return 1
        return None if self.tp_size % self.num_kv_heads else self.tp_size // self.num_kv_heads

    def kv_heads(self, rank: int) -> ShardRange:
        """Returns the KV heads of a rank."""
        if self.tp_size <= self.num_kv_heads:
            run = even_slice(self.num_kv_heads, rank, self.tp_size)
        else:
            head = rank * self.num_kv_heads // self.tp_size
            run = slice(head, head + 1)
        return ShardRange(self.num_kv_heads, run, self.padded_kv_heads)

    def heads(self, rank: int) -> ShardRange:
        """Returns the query heads of a rank."""
        kv, group = self.kv_heads(rank).run, self.group
        run = slice(kv.start * group, kv.stop * group)
        if self.tp_size > self.num_kv_heads:
            first, end = (-(-head * self.tp_size // self.num_kv_heads) for head in (kv.start, kv.stop))
            part = even_slice(group, rank - first, end - first)
            run = slice(run.start + part.start, run.start + part.stop)
        return ShardRange(self.num_heads, run, self.padded_heads)

    @property
    def padded(self) -> bool:
        """Returns whether a rank has fewer heads, of either kind, than it allocates."""
        return _padded(self)

    def cuts(self, dims: int, of_kv: bool, rank: int, group: int) -> bool:
        """Returns whether a rank's share of a matrix begins or ends within a group of `group` contiguous rows or
        columns, of which each query head (or KV head, with `of_kv`) has `dims`."""
        return _cuts(self, dims, of_kv, rank, group)


@lru_cache(maxsize=4096)  # every layer asks
def _padded(shares: HeadShares) -> bool:
    return any(shares.heads(rank).padded or shares.kv_heads(rank).padded for rank in range(shares.tp_size))


@lru_cache(maxsize=4096)
def _cuts(shares: HeadShares, dims: int, of_kv: bool, rank: int, group: int) -> bool:
    share = (shares.kv_heads(rank) if of_kv else shares.heads(rank)).scale_dims(dims)
    ends = {share.run.start, share.run.stop} - {share.total}
    return any(end % group for end in ends)


def even_slice(total: int, rank: int, size: int) -> slice:
    """Returns a rank's run of `total` things; where `size` ranks do not divide them, the first ranks have one more."""
    share, more = divmod(total, size)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))
