"""Prompts of the current requests as arrays: four bytes a token, shared by the samples of one prompt, and eight for the
keys of the prefix cache.

A list of Python integers takes several times as much, and thousands of samples of a long prompt may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.radix_node import Keys

Ids = npt.NDArray[np.int32]

MAX_PROMPT_BYTES = 1 << 30
"""Limit of the bytes of all prompts that run or wait, on each rank. Further requests are refused: a queue must be
bounded in size, not only in number."""
KEY_BYTES = 8
PROMPT_BYTES = 4 + KEY_BYTES
"""Bytes of a prompt's token: its id and its key."""
MEDIA_BYTES = KEY_BYTES + 8 + 3 * 8
"""Bytes a token of each sample of a prompt with media: a key, its place among an item's placeholders, and its position
in three sections (`PromptMedia`)."""


class Prompt:
    """The ids of a prompt, shared by several requests."""

    __slots__ = ("_keys", "ids", "num_users")

    def __init__(self, ids: Ids) -> None:
        self.ids, self.num_users = ids, 0
        self._keys: Keys | None = None

    @property
    def keys(self) -> Keys:
        """Returns the read-only prefix cache keys of a prompt without media."""
        if self._keys is None:
            self._keys = self.ids.astype(np.int64)
        return self._keys


class PromptTable:
    """Shares equal prompts among the current requests of a process, which may belong to several attention groups."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[int, int], Prompt] = {}
        """By length and hash. Of two prompts with one hash the second is shared with nobody."""
        self.num_users = 0
        self.num_bytes = 0
        """Of all prompts that are here, each once, and of what each request with media has besides."""

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, input_ids: Sequence[int] | Ids, has_media: bool = False) -> Prompt:
        """Returns the shared prompt of these ids; the caller must `give_back` it. has_media: the request has keys,
        places and positions of its own, because those of media are not in the prompt."""
        ids = np.array(input_ids, np.int32)
        prompt = self._prompts.get(_name(ids))
        if prompt is None or not np.array_equal(prompt.ids, ids):
            prompt = Prompt(ids)
            self._prompts.setdefault(_name(ids), prompt)
        if not prompt.num_users:
            self.num_bytes += len(ids) * PROMPT_BYTES
        self.num_bytes += len(ids) * MEDIA_BYTES * has_media
        prompt.num_users += 1
        self.num_users += 1
        return prompt

    def give_back(self, prompt: Prompt, has_media: bool = False) -> None:
        """Ends one use of a prompt that `take` returned; the last one frees it. has_media: as there."""
        self.num_bytes -= len(prompt.ids) * MEDIA_BYTES * has_media
        self.num_users -= 1
        prompt.num_users -= 1
        if prompt.num_users:
            return
        self.num_bytes -= len(prompt.ids) * PROMPT_BYTES
        name = _name(prompt.ids)
        if self._prompts.get(name) is prompt:
            del self._prompts[name]


def _name(ids: Ids) -> tuple[int, int]:
    return len(ids), hash(ids.tobytes())


class Tokens(Sequence[int]):
    """A request's prompt followed by its output."""

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
        """Returns a token, or for a slice without step a list."""
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
