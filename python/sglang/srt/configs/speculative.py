"""Settings of speculative decoding: the drafter, the number of tokens that a step verifies, how the depth is chosen. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError

ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK")
NGRAM, STANDALONE, EAGLE, EAGLE3, DFLASH, DSPARK = ALGORITHMS
NEXTN = "NEXTN"
"""Another name of EAGLE."""
BLOCK_ALGORITHMS = frozenset({DFLASH, DSPARK})
"""Algorithms whose drafts propose a block of tokens in one pass."""
DRAFT_MODEL_NEEDED = frozenset({STANDALONE, EAGLE3, DFLASH})
"""Algorithms whose drafts always come from a checkpoint of their own."""

MAX_DRAFT_TOKENS = 64
"""Most tokens of a request in a step, the last sampled one included."""
NGRAM_DRAFT_TOKENS = 8
"""Default of --speculative-num-draft-tokens for NGRAM: tokens of a request in a step.
Upstream's default of 12 counts the nodes of a tree with up to ten branches, which is seldom deeper than this chain."""
LONGEST_SUFFIX = 18
"""Most last tokens that NGRAM compares: upstream's default of --speculative-ngram-max-trie-depth."""
USUAL_BLOCK_SIZE = 16
"""Rows of a block of DFLASH where neither a flag nor the draft's config says how many."""
USUAL_DSPARK_SIZE = 7
"""Rows of a block of DSPARK, likewise."""
UNQUANTIZED = "unquant"
_DEEPER = frozenset({"LlamaForCausalLM", "Grok1ForCausalLM"})


def default_num_steps(algorithm: str, architecture: str) -> int:
    """Returns the number of draft tokens a step where no flag says how many. Follows upstream's defaults for
    (num-steps, topk, num-draft-tokens): (3, 1, 4), and (5, 4, 8) for Llama and Grok, of whose tree a chain of the same
    depth is verified."""
    if algorithm == NGRAM:
        return NGRAM_DRAFT_TOKENS - 1
    return 5 if architecture in _DEEPER else 3


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """Settings of NGRAM, which looks draft tokens up in earlier tokens."""

    longest_suffix: int = LONGEST_SUFFIX
    """Most last tokens that are compared with earlier tokens."""
    corpus_max_tokens: int = 10_000_000
    """Most tokens of one external corpus, and of all together."""


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Settings by which the number of draft tokens adapts to load and acceptance."""

    candidate_steps: tuple[int, ...] | None = None
    """Numbers of draft tokens that may be chosen; 0 always may. None: all up to the largest."""
    ema_alpha: float = 0.05
    """Share by which the weight of older observations falls with each interval."""
    update_interval: int = 5
    """Number of verify steps in an interval, and of steps between two choices under the same load."""
    hysteresis: float = 0.03
    """Share by which another number of draft tokens must be faster to be chosen."""
    probe_interval: int = 256
    """Number of steps without draft tokens after which a few steps with draft tokens test whether these pay again."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> AdaptiveSettings:
        """Reads the settings of --speculative-adaptive-config. Warns of keys that steer upstream's thresholds, because
        measured times decide here. Raises UserError that names an unknown key or a wrong value.

        >>> AdaptiveSettings.from_json({"candidate_steps": [1, 3]}, "a.json").candidate_steps (1, 3)
        """
        settings: dict[str, Any] = {}
        for key, value in values.items():
            if key in _THRESHOLDS:
                warn_once(f"{source}: {key!r} has no effect: the depth with the most tokens a second is taken.")
                continue
            if key not in _ADAPTIVE_KEYS:
                known = ", ".join(sorted({*_ADAPTIVE_KEYS, *_THRESHOLDS}))
                raise UserError(f"{source}: unknown key {key!r}. The keys are {known}.")
            settings[key] = _ADAPTIVE_KEYS[key](value, f"{source}: {key!r}")
        return cls(**settings)


@dataclass(frozen=True, slots=True)
class SpeculativeSettings:
    """Settings of the drafter, resolved once from the flags; `plan.speculation.speculative_settings` makes them."""

    algorithm: str
    """Name of the algorithm, one of `ALGORITHMS`."""
    num_draft_tokens: int
    """k, the most tokens of a request in a step, the last sampled one included."""
    draft_path: str | None = None
    """Path of the draft's checkpoint; None for NGRAM, and where the model's checkpoint has the draft: EAGLE (MTP) and
    DSPARK."""
    draft_revision: str | None = None
    draft_load_format: str = "auto"
    draft_quantization: str | None = None
    """Quantization of the draft's weights; `unquant`: 16 bits; None: as its checkpoint says, tensor by tensor."""
    adaptive: AdaptiveSettings | None = None
    """Settings of the adaptive depth; None: every step verifies `num_draft_tokens` of each request, fewer with many
    requests (`plan.step_widths`)."""
    ngram: NgramSettings = NgramSettings()
    block_size: int = 0
    """Rows of a block that DFLASH or DSPARK computes at once, the last sampled token's included; 0 for other
    drafters."""
    block_draft_tokens: int = 0
    """Draft tokens that these rows make: one each, or one each except for the first."""

    @property
    def num_steps(self) -> int:
        """Number of draft tokens a step."""
        return self.num_draft_tokens - 1

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of tokens per request that a step may bring, ascending. They are few, because each has graphs of
        its own. Where the depth is fixed, those below the most are for steps with many requests."""
        steps = (self.adaptive and self.adaptive.candidate_steps) or (1, 3, 5)
        shorter = (step + 1 for step in steps if step < self.num_draft_tokens)
        return tuple(sorted({1, self.num_draft_tokens, *shorter}))

    @property
    def lookahead_slots(self) -> int:
        """Number of positions, from the last sampled token on, for which the drafter keeps keys and values of its
        own."""
        if self.algorithm == NGRAM:
            return 0
        chain = self.num_draft_tokens - (1 if self.algorithm == STANDALONE else 2)  # the last draft token has no row
        return self.block_size or chain

    def uncertain_slots_of(self, steps_in_flight: int) -> int:
        """Returns the most positions with a cache slot that a decoding request has behind its certain ones, while
        `steps_in_flight` steps are under way and another is launched."""
        return steps_in_flight * (self.num_draft_tokens - 1) + self.num_draft_tokens + self.lookahead_slots


def _fraction(value: Any, name: str) -> float:
    """Reads a number above 0, up to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise UserError(f"{name} must be a number above 0 and at most 1; got {value!r}.")
    return float(value)


def _margin(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UserError(f"{name} must be a number from 0 up to, not including, 1; got {value!r}.")
    return float(value)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be a whole number above 0; got {value!r}.")
    return value


def _steps(value: Any, name: str) -> tuple[int, ...]:
    """Reads a list of numbers, or upstream's object from batch sizes to lists, whose numbers are merged."""
    lists = list(value.values()) if isinstance(value, Mapping) else [value]
    numbers = [number for part in lists for number in (part if isinstance(part, list) else [part])]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MAX_DRAFT_TOKENS:
            raise UserError(f"{name} must list numbers of draft tokens, 0 to {MAX_DRAFT_TOKENS - 1}; got {number!r}.")
    if not any(numbers):
        raise UserError(f"{name} must list a number of draft tokens above 0; got {value!r}.")
    return tuple(sorted({number for number in numbers if number}))


_ADAPTIVE_KEYS = {
    "candidate_steps": _steps,
    "ema_alpha": _fraction,
    "update_interval": _count,
    "hysteresis": _margin,
    "probe_interval": _count,
}
_THRESHOLDS = frozenset({"up_hysteresis", "down_hysteresis", "ceiling_coeff", "warmup_batches"})
