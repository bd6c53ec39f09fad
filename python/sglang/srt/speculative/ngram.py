"""Draft tokens looked up as the continuation of the latest tokens, earlier in the request or in external texts.

    history  [request slots + 1, context_len] int32    tokens by position; behind the last one, the latest draft tokens

It is a table instead of a trie: each step searches the longest match again, which takes microseconds on a GPU, forgets
nothing and needs no host. Source: prompt lookup decoding (Saxena, 2023), here with suffixes of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.configs.speculative import NgramSettings
from sglang.srt.layers.ops import NgramDraftsOp
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.speculative.corpus import DeviceCorpus, Texts
from sglang.srt.utils.device_arrays import to_device

if TYPE_CHECKING:
    from sglang.srt.speculative.drafter import DraftStep


class NgramDrafter:
    """Proposes the tokens that followed the longest earlier match. Implements Drafter."""

    aux_layers: tuple[int, ...] = ()
    lookahead_slots = 0
    next_tokens_read = 0
    caches: tuple[CacheStore, ...] = ()

    def __init__(
        self,
        op: NgramDraftsOp,
        settings: NgramSettings,
        num_tokens: int,
        max_requests: int,
        context_len: int,
        device: torch.device | str,
    ) -> None:
        self.num_tokens = num_tokens
        self._op, self._longest = op, settings.longest_suffix
        self._corpus = DeviceCorpus(settings.corpus_max_tokens, device)
        self.history = torch.zeros((max_requests + 1, context_len), dtype=torch.int32, device=device)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Writes the request's tokens to its slot, in stream order: steps in flight still propose for the slot's last
        request."""
        known = to_device(np.asarray(tokens, np.int32), self.history.device)
        self.history[slot, : len(known)] = known

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        """Returns the draft tokens, and stores the sampled token even if none are wanted. The draft tokens are stored
        too: accepted ones equal the sampled tokens, and the others are overwritten before they are read."""
        corpus = self._corpus.arrays
        return self._op(self.history, step.slots, step.lens, step.tokens, self._longest, num_speculative_tokens, corpus)

    def read_texts(self, path: Path) -> Texts:
        """Reads a file of `managers.front.corpora`."""
        return self._corpus.read(path)

    def use_texts(self, texts: Texts) -> None:
        """Replaces the external texts."""
        self._corpus.load(texts)
