"""External texts on the device, in which n-gram drafting looks up continuations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Texts = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Tokens of all texts, and their suffixes in order."""


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
