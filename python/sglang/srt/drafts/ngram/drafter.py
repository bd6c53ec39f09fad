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
import numpy.typing as npt
import torch

from sglang.srt.configs.speculative import NgramSettings
from sglang.srt.layers.ops import NGRAM_DRAFTS
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.utils.device_arrays import to_device

if TYPE_CHECKING:
    from sglang.srt.drafts.drafter import DraftStep
    from sglang.srt.plan.plan import Plan

Texts = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Tokens of all texts, and their suffixes in order."""


class NgramDrafter:
    """Proposes the tokens that followed the longest earlier match. Implements Drafter."""

    aux_layers: tuple[int, ...] = ()
    lookahead_slots = 0
    next_tokens_read = 0
    caches: tuple[CacheStore, ...] = ()

    def __init__(self, plan: Plan, settings: NgramSettings) -> None:
        self.num_tokens = plan.verified_tokens
        self._op = plan.entry(NGRAM_DRAFTS)
        self._longest = settings.longest_suffix
        self._corpus = DeviceCorpus(settings.corpus_max_tokens, plan.device)
        shape = (plan.max_running_requests + 1, plan.context_len)
        self.history = torch.zeros(shape, dtype=torch.int32, device=plan.device)

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


class DeviceCorpus:
    """Tokens and suffix order of all texts, at the fixed addresses that CUDA graphs need."""

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        tokens = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        order = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.arrays = (tokens, order, torch.zeros(1, dtype=torch.int32, device=device))
        """Arrays of the texts, as `native_ngram.Corpus` takes them."""

    def read(self, path: Path) -> Texts:
        """Reads a file that `managers.front.corpora` wrote. Raises an error, such as OSError, if that is not
        possible."""
        with np.load(path) as content:
            texts = content["tokens"], content["order"]
        assert len(texts[0]) <= len(self.arrays[0]), "the tokens are counted where texts come in"
        return texts

    def load(self, content: Texts) -> None:
        """Copies what was read to the device, on the current stream, so steps launched before read the old texts."""
        texts, sorted_ends = content
        tokens, order, size = self.arrays
        size.zero_()
        tokens[: len(texts)].copy_(torch.from_numpy(texts))
        tokens[len(texts) :].fill_(-1)
        order[: len(sorted_ends)].copy_(torch.from_numpy(sorted_ends))
        size.fill_(len(sorted_ends))
