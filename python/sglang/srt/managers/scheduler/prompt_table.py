"""Prompts of the requests that are here, as arrays: four bytes a token, and samples of one prompt share them.

A list of Python's numbers takes more than ten times as much, and thousands of samples of a long prompt may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.radix_node import Keys

Ids = npt.NDArray[np.int32]

MAX_PROMPT_TOKENS = 1 << 27
"""Of all prompts that run or wait, on each rank: 512 MiB. Beyond that a request is refused: a queue is bounded by what
it holds, too, and not only by the number of its requests."""


class Prompt:
    """The ids of a prompt, which several requests may have."""

    __slots__ = ("_keys", "ids", "num_users")

    def __init__(self, ids: Ids) -> None:
        self.ids, self.num_users = ids, 0
        self._keys: Keys | None = None

    @property
    def keys(self) -> Keys:
        """The keys in the prefix cache of a prompt without images and videos; not to be written."""
        if self._keys is None:
            self._keys = self.ids.astype(np.int64)
        return self._keys


class PromptTable:
    """Finds the prompt of a request among those that are here."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[int, int], Prompt] = {}
        """By length and hash. Of two prompts with one hash the second is shared with nobody."""
        self.num_tokens = 0
        """Of all prompts that are here, each once."""

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, input_ids: Sequence[int] | Ids) -> Prompt:
        """Until `give_back`."""
        ids = np.array(input_ids, np.int32)
        prompt = self._prompts.get(_name(ids))
        if prompt is None or not np.array_equal(prompt.ids, ids):
            prompt = Prompt(ids)
            self._prompts.setdefault(_name(ids), prompt)
        if not prompt.num_users:
            self.num_tokens += len(ids)
        prompt.num_users += 1
        return prompt

    def give_back(self, prompt: Prompt) -> None:
        prompt.num_users -= 1
        if prompt.num_users:
            return
        self.num_tokens -= len(prompt.ids)
        name = _name(prompt.ids)
        if self._prompts.get(name) is prompt:
            del self._prompts[name]


def _name(ids: Ids) -> tuple[int, int]:
    return len(ids), hash(ids.tobytes())


class Tokens(Sequence[int]):
    """A request's prompt, and the output behind it."""

    __slots__ = ("num_prompt", "output", "prompt")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.num_prompt = prompt.ids, len(prompt.ids)
        self.output: list[int] = []

    def __len__(self) -> int:
        return self.num_prompt + len(self.output)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """A slice is a list, and has no step."""
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            assert step == 1, "tokens are read in their order"
            first, last = max(0, start - self.num_prompt), max(0, end - self.num_prompt)
            return [*self.prompt[start:end].tolist(), *self.output[first:last]]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("no such token")
        return int(self.prompt[index]) if index < self.num_prompt else self.output[index - self.num_prompt]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.generic]:
        return np.concatenate((self.prompt, np.array(self.output, np.int32))).astype(dtype or np.int32)
