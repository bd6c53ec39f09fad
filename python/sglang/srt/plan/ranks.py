"""How many ranks serve a model, and which of its dimensions each of them has. No torch.

All ranks share every dense layer. Experts may be shared in two ways at once: `ep_size` groups of neighbouring ranks
have whole experts each, and the ranks of a group share the intermediate dims of theirs. Rank r of TP 4 x EP 2 belongs
to expert group r // 2 and has part r % 2 of its experts' dims.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """`ep_size` divides `tp_size`."""

    tp_size: int = 1
    ep_size: int = 1

    @property
    def expert_tp_size(self) -> int:
        """Ranks that share the intermediate dims of an expert."""
        return self.tp_size // self.ep_size

    @property
    def flags(self) -> str:
        """As the user asks for it."""
        experts = f" --ep-size {self.ep_size}" if self.ep_size > 1 else ""
        return f"--tp-size {self.tp_size}{experts}"

    def ep_rank(self, rank: int) -> int:
        """The expert group of a rank."""
        return rank // self.expert_tp_size

    def expert_tp_rank(self, rank: int) -> int:
        """Which part of its experts' dims a rank has."""
        return rank % self.expert_tp_size

    def expert_room(self, num_experts: int) -> int:
        """Whole experts that a rank has room for."""
        return -(-num_experts // self.ep_size)


ONE_RANK = RankLayout()


def even_slice(total: int, rank: int, size: int) -> slice:
    """This rank's run of `total` things; of sizes that do not divide the first ranks have one more."""
    share, more = divmod(total, size)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))
