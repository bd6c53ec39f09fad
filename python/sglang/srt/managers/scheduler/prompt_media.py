"""Images and videos of one prompt: keys for the prefix cache, M-RoPE positions, and the features that a chunk needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.radix_node import Keys
from sglang.srt.plan.media import MediaDescription
from sglang.srt.utils.media_item import MediaItem

Positions = npt.NDArray[np.int64]

_ABOVE_TOKENS = np.uint64(1 << 62)
"""Keys of placeholders have this bit, and token ids do not."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class MediaMismatch(ValueError):
    """Raised if the spans of a prompt's images do not fit the prompt or the images."""


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Rows of an item's features for a chunk: row `features[i]` is the embedding of token `tokens[i]` of the chunk, [N]
    each. `fill`: as in `MediaDescription`."""

    item: MediaItem
    features: Positions
    tokens: Positions
    fill: int = 0

    @property
    def joined(self) -> Positions:
        """Those of `tokens` that see one another where images are seen both ways."""
        return self.tokens[self.features >= self.fill]

    def runs(self) -> list[tuple[int, int]]:
        """Returns the first token and the length of each run of `joined` tokens without a gap."""
        tokens = self.joined
        pieces = np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)
        return [(int(piece[0]), len(piece)) for piece in pieces if len(piece)]


def item_keys(digest: bytes, count: int, first: int = 0) -> Keys:
    """Returns the keys of an item's placeholders in the prefix cache, [count]: 62 bits of a hash (SplitMix64) of the
    index, from `first` on, and one of the four words of the digest, in rotation. So two items whose keys agree at four
    consecutive places have 248 bits of their digests in common."""
    words = np.frombuffer(digest, "<u8")
    index = np.arange(first, first + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = words[(index % np.uint64(len(words))).astype(np.int64)] + (index + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        x ^= x >> np.uint64(31)
    keys: Keys = ((x >> np.uint64(2)) | _ABOVE_TOKENS).astype(np.int64)
    return keys


def section_positions(items: Sequence[MediaItem], merge: int, positions_a_second: int) -> tuple[Positions, int]:
    """Returns time, row and column of the tokens up to the last placeholder [3, end], and the offset of later text
    positions from their index.

    Text has one number in all three. A run of placeholders begins where the text before it ends; its frames, rows and
    columns count from there, and text goes on after the largest position. Source: Qwen2-VL (arXiv 2409.12191), with the
    frames of a video in runs of their own as in Qwen3-VL, or `positions_a_second` as in Qwen2.5-VL (2502.13923).
    """
    runs = sorted((start, end, item) for item in items for start, end in item.spans)
    parts: list[Positions] = []
    position = done = 0
    for start, end, item in runs:
        parts.append(np.tile(np.arange(position, position + start - done), (3, 1)))
        position += start - done
        frames, rows, columns = item.grid[0] // len(item.spans), item.grid[1] // merge, item.grid[2] // merge
        places = np.indices((frames, rows, columns)).reshape(3, -1)
        if positions_a_second and item.kind == "video":
            places[0] = places[0] * (item.frame_seconds * positions_a_second)
        parts.append(places + position)
        position, done = position + int(places.max()) + 1, end
    return np.concatenate(parts, axis=1).astype(np.int64), position - done


class PromptMedia:
    """The items of one prompt. Raises MediaMismatch."""

    def __init__(self, items: Sequence[MediaItem], prompt_len: int, description: MediaDescription) -> None:
        self.items = tuple(items)
        end = 0
        runs = sorted(span for item in items for span in item.spans)
        for start, stop in runs:
            if not end <= start < stop <= prompt_len:
                raise MediaMismatch(f"an image has the tokens {start} to {stop} of {prompt_len}")
            end = stop
        self.end = end
        """Tokens up to the last placeholder."""
        self._starts, self._stops = np.array(runs, np.int64).reshape(-1, 2).T
        """Of the runs of placeholders, in token order."""
        items = sorted(items, key=lambda item: item.spans[0])
        self._in_order = items
        self._tokens = [np.concatenate([np.arange(*span) for span in item.spans]) for item in items]
        """Placeholders of each item of `_in_order`."""
        self._firsts = np.array([tokens[0] for tokens in self._tokens], np.int64)
        lasts = np.array([tokens[-1] for tokens in self._tokens], np.int64)
        self._lasts = np.maximum.accumulate(lasts)
        """The last placeholder of each item and of all before it: items with several runs may be interleaved."""
        self._fill, self._left_out = description.fill, (self._firsts % (description.fill + 1)).tolist()
        """Features of each item that have no placeholder, as they would only fill the prompt before it."""
        for item, tokens, left_out in zip(items, self._tokens, self._left_out, strict=True):
            frames = -(-item.grid[0] // description.tower.pooled_frames)
            if len(tokens) + left_out != description.num_tokens(item.grid) or frames % len(item.spans):
                raise MediaMismatch(f"{len(tokens)} placeholders for a grid of {item.grid} patches")
            if item.pixels.shape[:1] != [math.prod(item.grid)]:
                raise MediaMismatch(f"pixels of shape {item.pixels.shape} for a grid of {item.grid} patches")
        self.both_ways = description.both_ways
        self.longest_run = max(stop - start for item in items for start, stop in item.spans)
        self.positions: Positions | None = None
        """[3, end]; None where positions have no sections."""
        self.delta = 0
        if description.sections:
            self.positions, self.delta = section_positions(items, description.merge, description.positions_a_second)

    def write_keys(self, keys: Keys) -> None:
        """Overwrites the placeholders' keys in the keys of the whole prompt."""
        for item, tokens, left_out in zip(self._in_order, self._tokens, self._left_out, strict=True):
            keys[tokens] = item_keys(item.digest, len(tokens), left_out)

    def needed(self, begin: int, end: int) -> list[ItemRows]:
        """Returns the features for the tokens from `begin` to `end`, in the order of their items' first tokens. Looks
        at few other items."""
        needed = []
        there = slice(int(np.searchsorted(self._lasts, begin)), int(np.searchsorted(self._firsts, end)))
        of_items = zip(self._in_order[there], self._tokens[there], self._left_out[there], strict=True)
        for item, tokens, left_out in of_items:
            first, last = np.searchsorted(tokens, (begin, end)).tolist()
            if first < last:
                features = np.arange(first, last) + left_out
                needed.append(ItemRows(item, features, tokens[first:last] - begin, self._fill))
        return needed

    def uncut_end(self, begin: int, end: int) -> int:
        """Returns where a chunk from `begin` to `end` must end in order not to cut a run of placeholders that attend to
        one another: `begin` if such a run comes first."""
        if not self.both_ways:
            return end
        run = int(np.searchsorted(self._starts, end)) - 1
        is_cut = run >= 0 and end < self._stops[run]
        return max(int(self._starts[run]) if is_cut else end, begin)

    def run_end(self, token: int) -> int:
        """Returns the end of the run of placeholders that contains this token."""
        return int(self._stops[np.searchsorted(self._starts, token, side="right") - 1])

    def first_token(self, item: MediaItem, begin: int) -> int:
        """Returns the first placeholder of the item from `begin` on."""
        return next(max(start, begin) for start, end in item.spans if end > begin)

    def positions_of(self, begin: int, end: int) -> Positions:
        """Returns time, row and column of these tokens, [3, end - begin]."""
        assert self.positions is not None
        behind = np.arange(max(begin, self.end), max(end, self.end)) + self.delta
        return np.concatenate((self.positions[:, begin:end], np.tile(behind, (3, 1))), axis=1)
