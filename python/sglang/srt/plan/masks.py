"""Masks: which tokens a token of a request attends to. `GQA.mask` is one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.plan.cache_spec import FULL, Full, Window


class Mask(Protocol):
    """A mask, with answers that hold for a token that attends to itself and all tokens before it."""

    __slots__ = ()

    @property
    def window(self) -> int:
        """Most tokens that a token attends to because of its position; 0: all before it."""
        return 0

    @property
    def chunked(self) -> bool:
        """Returns whether windows are chunks."""
        return False

    @property
    def rows(self) -> int:
        """Rows of a request that see each other."""
        return 1

    @property
    def indexer(self) -> BlockIndexer | TokenIndexer | None:
        """The indexer that selects blocks of tokens for each KV head, or tokens for all of them."""
        return None

    @property
    def lifetime(self) -> Full | Window:
        """Lifetime of keys and values."""
        return FULL

    @property
    def traits(self) -> tuple[str, ...]:
        """Traits of the needs of attention."""
        return ()

    def lagging(self, draft_tokens: int) -> Mask:
        """Returns the mask of drafts whose rows lag up to `draft_tokens` - 1 tokens behind the request."""
        return self


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A token attends to itself and all tokens before it."""


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A token attends to the last `tokens` tokens, itself among them. `slack`: further tokens that the cache keeps, for
    drafts whose rows lag behind the request."""

    tokens: int
    slack: int = 0

    @property
    def window(self) -> int:
        return self.tokens

    @property
    def lifetime(self) -> Window:
        return Window(self.tokens + self.slack)

    @property
    def traits(self) -> tuple[str, ...]:
        return ("sliding_window", "window_slack") if self.slack else ("sliding_window",)

    def lagging(self, draft_tokens: int) -> Mask:
        return replace(self, slack=draft_tokens - 1)


@dataclass(frozen=True, slots=True)
class Chunks(Mask):
    """Tokens are in chunks of `tokens` from the first one on; a token attends to those before it in its chunk."""

    tokens: int

    @property
    def window(self) -> int:
        return self.tokens

    @property
    def chunked(self) -> bool:
        return True

    @property
    def lifetime(self) -> Window:
        return Window(self.tokens, chunked=True)

    @property
    def traits(self) -> tuple[str, ...]:
        return ("sliding_window", "chunked")

    def lagging(self, draft_tokens: int) -> Mask:
        raise TypeError("chunks keep no tokens for rows that lag behind")


@dataclass(frozen=True, slots=True)
class SelectedBlocks(Mask):
    """A token attends to the blocks of tokens that an indexer selects for each KV head."""

    blocks: BlockIndexer

    @property
    def indexer(self) -> BlockIndexer:
        return self.blocks


@dataclass(frozen=True, slots=True)
class SelectedTokens(Mask):
    """A token attends to the tokens that an indexer selects for all heads."""

    tokens: TokenIndexer

    @property
    def indexer(self) -> TokenIndexer:
        return self.tokens


@dataclass(frozen=True, slots=True)
class RowBlock(Mask):
    """`size` rows of a request see each other, and before them all tokens, or those of a window (block drafts).
    `causal`: of each other, a row sees itself and those before it, and its window ends with it."""

    size: int
    before: Causal | SlidingWindow
    causal: bool = False

    @property
    def window(self) -> int:
        return self.before.window

    @property
    def rows(self) -> int:
        return self.size

    @property
    def lifetime(self) -> Full | Window:
        return self.before.lifetime

    @property
    def traits(self) -> tuple[str, ...]:
        return self.before.traits


CAUSAL = Causal()


def windowed(tokens: int) -> Mask:
    """Returns the mask with a window of `tokens` tokens; 0: without one."""
    return SlidingWindow(tokens) if tokens else CAUSAL
