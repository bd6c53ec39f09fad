"""What the plan asks a layer's blocks besides their ops, caches and weights, with answers that hold for most of them.

A mixer or feed-forward block derives from one of these classes and overrides what differs. Any stands for a class of a
module that imports this one; docstrings name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.plan.ranks import HeadShares

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class HeadDims:
    """The rows (axis 0) or columns (axis 1) of a matrix that belong to one head: `dims` contiguous ones for each query
    head, or for each KV head with `of_kv`. `matrix`, `parts`: as in Matrix."""

    matrix: str
    parts: tuple[str, ...]
    axis: int
    dims: int
    of_kv: bool = False


class MixerDefaults(Protocol):
    """A mixer without attention to cached tokens, whose heads ranks divide evenly."""

    __slots__ = ()

    # --- division over ranks -------------------------------------------------------------------------------------

    def shares(self, tp_size: int) -> HeadShares | None:
        """Returns how heads are divided over ranks, where the division may be uneven; None: it must be even."""
        return None

    @property
    def kv_heads(self) -> int:
        """KV heads that ranks hold whole; 0: the mixer has none."""
        return 0

    def uneven_part(self, tp_size: int) -> str:
        """Returns the number and name of a part, besides heads, that ranks cannot divide evenly; "": they can."""
        return ""

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        """Yields the rows and columns of heads within which ranks must not cut quantization groups."""
        yield from ()

    def share_problems(self, tp_size: int, module_of: Callable[[str, str], str]) -> Iterator[str]:
        """Yields problems of uneven shares. `module_of`: returns the checkpoint's name of a matrix's part."""
        yield from ()

    def with_scale_rows(self, rows_of: Callable[[Any], int]) -> Self:
        """Returns the mixer with the rows noted that share scales in the checkpoint. `rows_of`: returns a matrix's."""
        return self

    def effective_dcp_size(self, tp_size: int, dcp_size: int) -> int:
        """Returns over how many of `dcp_size` ranks the tokens of the cache are sharded; 1: each has all tokens."""
        return 1

    @property
    def defers_all_reduce(self) -> bool:
        """Returns whether the all-reduce may be deferred to the norm behind the mixer: no bias is part of the sum, and
        no norm spans the heads of all ranks."""
        return True

    # --- caches --------------------------------------------------------------------------------------------------

    @property
    def caches_tokens(self) -> bool:
        """Returns whether the layer attends to no other layer's keys and values."""
        return True

    @property
    def merges_tokens(self) -> bool:
        """Returns whether cache entries may stand for several tokens: they are whole on every rank."""
        return False

    @property
    def caches_four_bits(self) -> bool:
        """Returns whether a cache in four bits is planned or refused by name: otherwise it gets eight, with a note."""
        return True

    @property
    def shares_entries(self) -> bool:
        """Returns whether layers read entries that another layer made."""
        return False

    @property
    def follows_layer(self) -> bool:
        """Returns whether the layer takes an earlier layer's selection or entries, so that one stage has both."""
        return False

    @property
    def cache_scale_bytes(self) -> int:
        """Bytes of the scales of an FP8 cache."""
        return 0

    def verified_elements(self, tp_size: int) -> tuple[int, int]:
        """Returns what a recurrent state keeps of a token until it is accepted: elements of the model's dtype, and fp32
        elements."""
        return 0, 0

    def convolved_elements(self, tp_size: int) -> int:
        """Returns the elements of a token that short convolutions take."""
        return 0

    # --- attention and selection ---------------------------------------------------------------------------------

    def attention_shape(self, tp_size: int) -> Any:
        """Returns the heads with which decode attends to a cache; None: there is no such attention, or a selection for
        each token."""
        return None

    def attention_site(self, tp_size: int, dcp_size: int) -> Any:
        """Returns the attention site on one rank; None: no backend plans attention."""
        return None

    @property
    def further_ropes(self) -> tuple[Any, ...]:
        """The rotary embeddings (RopeSpec) of the mixer besides its `rope`."""
        return ()

    @property
    def latents(self) -> Any:
        """The mixer itself if it is latent attention for which a backend plans a step."""
        return None

    @property
    def latent_heads(self) -> Any:
        """The heads of any latent attention, an MLA: those whose keys and values `kv_b_proj` makes of latents."""
        return None

    @property
    def block_indexer(self) -> Any:
        """The indexer that selects blocks of tokens for each KV head."""
        return None

    @property
    def block_budget(self) -> int:
        """Most tokens in blocks that are selected by pooled keys; 0: all tokens are read."""
        return 0

    @property
    def short_prefill_graphs(self) -> bool:
        """Returns whether prefill graphs end at LATENT_GRAPH_TOKENS: they hold a form that is slower for long
        prompts."""
        return False

    @property
    def unselected_rate(self) -> int:
        """Tokens of a compressed entry, where a token attends to all such entries; 0: there are none."""
        return 0

    def selected_slots(self, tp_size: int) -> int:
        """Returns the slots of a token's selection: one for each token, or for each block and KV head."""
        return 0

    def token_scores(self, context_len: int, tp_size: int) -> int:
        """Returns the scores that an indexer computes for a token at the end of the context."""
        return context_len

    # --- drafts --------------------------------------------------------------------------------------------------

    @property
    def keeps_selection(self) -> bool:
        """Returns whether later draft passes must take the first pass's selection."""
        return False

    def unselected(self) -> Any:
        """Returns the mixer as attention to all tokens."""
        return self

    def in_blocks(self, size: int, causal: bool = False) -> Self:
        """Returns the mixer for drafts whose `size` rows of a request see each other; `causal`: each those before
        it."""
        raise TypeError(f"{type(self).__name__} has no rows that see each other")

    def with_input_size(self, size: int) -> Self:
        """Returns the mixer for inputs of `size` elements."""
        raise TypeError(f"{type(self).__name__} takes inputs of the hidden size")

    def lagging(self, draft_tokens: int, convolved: bool) -> Self:
        """Returns the mixer for drafts whose rows lag behind the request (`mtp_by_layer`). `convolved`: outputs of
        blocks are convolved, and so are keys and values."""
        raise TypeError(f"{type(self).__name__} keeps no tokens for rows that lag behind")


class FeedForwardDefaults(Protocol):
    """A block that computes each token alone, without experts or an MLP."""

    __slots__ = ()

    @property
    def experts(self) -> Any:
        """The block itself if it has routed experts."""
        return None

    @property
    def mlp(self) -> Any:
        """The MLP that computes every token: the block itself, or a shared expert apart from the routed ones."""
        return None

    @property
    def per_layer(self) -> Any:
        """The block itself if it adds an embedding of the token in every layer."""
        return None

    @property
    def table(self) -> Any:
        """The block itself if it looks up n-grams in a table."""
        return None

    def uneven_part(self, tp_size: int) -> str:
        """Returns the number and name of a part that ranks cannot divide evenly; "": they can."""
        return ""

    def with_image_token(self, token: int) -> Self:
        """Returns the block for a model that is served with images, whose placeholder is `token`."""
        return self

    def with_slots(self, slots: int, buffered: int) -> Self:
        """Returns the block with its experts, if it has any, in main memory."""
        return self

    def with_cpu_threads(self, threads: int) -> Self:
        """Returns the block with some of its experts in main memory, if it has any, computed by CPUs."""
        return self

    @property
    def defers_all_reduce(self) -> bool:
        """Returns whether no bias is part of the sum over ranks."""
        return True

    def with_scale_groups(self, group_of: Callable[[str, Any], int]) -> Self:
        """Returns the block with the intermediate dims noted that share scales in the checkpoint. `group_of`: returns
        those of an MLP by the beginning of its matrices' names."""
        return self

    def with_scale_rows(self, rows_of: Callable[[Any], int]) -> Self:
        """Returns the block with the rows noted that share scales in projections around its experts. `rows_of`: returns
        a matrix's."""
        return self
