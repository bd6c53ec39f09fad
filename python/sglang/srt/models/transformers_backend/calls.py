"""Records what a model class does in a run without weights: its calls of attention and experts, and its masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.models.transformers_backend.rotations import Rotations

NOT_COMPUTED = ("indices", "block_indices", "position_bias", "sinks", "relative_bias", "score_mod")
"""Arguments of attention calls that change its result, and that nothing computes here."""
HARMLESS = frozenset(
    {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids"}
    | {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "cache_position"}
    | {"logits_to_keep", "past_key_values", "return_dict", "labels", "token_type_ids", "head_mask"}
)
"""Arguments that are read here, or that do not change the result."""
TOKENS = 7


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of attention. mask: what the class passed; the number of its `Calls.masks`, None without one, or -1 for a
    tensor of its own. rotary_dim: dims of queries and keys that were rotated just before."""

    module: torch.nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: int | None
    arguments: dict[str, Any]
    rotary_dim: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """A call of a layer's experts with `top_k` chosen ones for each token."""

    module: torch.nn.Module
    top_k: int


@dataclass(slots=True)
class Calls:
    """The calls of one run, in order. The methods are registered in the place of transformers' functions."""

    attention: list[AttentionCall] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    rotations: Rotations = field(default_factory=Rotations)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns an output [1, T, H, Dv] without values."""
        numbers = [i for i, (mask, _) in enumerate(self.masks) if mask is attention_mask]
        number = None if attention_mask is None else numbers[0] if numbers else -1
        said = {name: argument for name, argument in arguments.items() if argument is not None}
        rotary_dim = self.rotations.dim_of(query, key)
        self.attention.append(AttentionCall(module, query.shape, key.shape, value.shape, number, said, rotary_dim))
        batch, heads, tokens, _ = query.shape
        return query.new_empty((batch, tokens, heads, value.shape[-1])), None

    def compute_experts(
        self, module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns outputs of experts without values."""
        self.experts.append(ExpertsCall(module, chosen.shape[-1]))
        return torch.empty_like(hidden)

    def mask(self, **facts: Any) -> torch.Tensor:
        """Returns a mask without values, which is known again when attention gets it."""
        self.masks.append((torch.empty((1, 1, TOKENS, TOKENS), device="meta"), facts))
        return self.masks[-1][0]

    def window_of(self, call: AttentionCall) -> int:
        """Returns the window of a call; 0: it sees all tokens. Raises ValueError that says what it is if it is neither:
        the mask itself is compared at its edges."""
        window = int(call.arguments.get("sliding_window") or 0)
        if call.mask is None:
            return window
        if call.mask < 0:
            raise ValueError("its class makes masks of its own")
        facts = self.masks[call.mask][1]
        stated = int(facts.get("local_size") or 0)
        if not _is_causal(facts["mask_function"], stated):
            raise ValueError("a mask is neither causal nor a causal window")
        if window and window != stated:
            raise ValueError(f"attention is called with a window of {window} tokens and a mask of {stated or 'all'}")
        return stated

    def sight_of(self, call: AttentionCall, is_causal: bool) -> tuple[bool, int]:
        """Returns whether a call is causal and its window, as `AttentionFact` has them, of a class that may attend to
        both sides. is_causal: what the class says itself. Raises ValueError as `window_of` does."""
        facts = self.masks[call.mask][1] if call.mask is not None and call.mask >= 0 else None
        if facts is None and not is_causal:
            if call.mask is not None:
                raise ValueError("its class makes masks of its own")
            if call.arguments.get("sliding_window"):
                raise ValueError("its attention has a window to both sides without a mask")
            return False, 0
        window = int((facts or {}).get("local_size") or call.arguments.get("sliding_window") or 0)
        ahead = 0 if facts is None else _tokens_ahead(facts["mask_function"], window)
        if not ahead or facts is None:
            return True, self.window_of(call)
        reach = ahead if ahead < _far(window) else 0
        if not _sees_both_sides(facts["mask_function"], reach):
            raise ValueError("a mask is neither causal nor the same to both sides")
        return False, reach + 1 if reach else 0


def _far(window: int) -> int:
    """Returns a distance beyond every window to both sides that a class may make of `window`."""
    return 4 * (window or 16) + 4


def _tokens_ahead(allows: Any, window: int) -> int:
    """Returns how many tokens behind itself a token sees, at most `_far(window)`."""
    far = _far(window)
    return int(_allowed(allows, torch.tensor([[far]]), torch.arange(far + 1, 2 * far + 1)[None]).sum())


def _sees_both_sides(allows: Any, reach: int) -> bool:
    """Returns whether a mask function lets tokens see those that are up to `reach` away; 0: all."""
    edge = reach or 16
    rows = torch.tensor(sorted({0, 1, edge - 1, edge, edge + 1, 2 * edge + 1}))[:, None]
    cols = torch.arange(4 * edge + 4)[None]
    expected = (rows - cols).abs() <= edge if reach else torch.ones(len(rows), cols.shape[1], dtype=torch.bool)
    return bool((_allowed(allows, rows, cols) == expected).all())


def _allowed(allows: Any, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Returns what a mask function says of tokens `rows` [R, 1] and `cols` [1, C]."""
    zero = torch.zeros((), dtype=torch.int64)
    return torch.as_tensor(allows(zero, zero, rows, cols)).expand(len(rows), cols.shape[1])


def _is_causal(allows: Any, window: int) -> bool:
    """Returns whether a mask function is that of causal attention with this window (0: none)."""
    reach = window or 16
    rows = torch.tensor(sorted({0, 1, 2, reach - 1, reach, reach + 1, 2 * reach + 1}))[:, None]
    cols = torch.arange(2 * reach + 4)[None]
    expected = (cols <= rows) & (cols > rows - window if window else True)
    return bool((_allowed(allows, rows, cols) == expected).all())
