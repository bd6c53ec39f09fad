"""Expansion of placeholders in token ids: a template writes one for each image or video, the model reads one for each
embedding."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.media_source import KINDS, Kind
from sglang.srt.managers.front.media.media_tokens import MediaTokens
from sglang.srt.managers.front.media.messages import Features
from sglang.srt.managers.wire.io_struct import MediaItem
from sglang.srt.managers.wire.token_ids import Ids


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """One decoded image or video. `parts`: token ids and lengths of runs of placeholders, as they stand in the
    prompt."""

    kind: Kind
    items: list[Features]
    parts: list[list[int] | int]


def expand(ids: Ids, media: Sequence[PlacedMedia], tokens: MediaTokens) -> tuple[Ids, list[MediaItem]]:
    """Replaces each placeholder by the tokens of its image or video, in order; returns the ids and the items with their
    positions. Raises RequestError if the number of placeholders differs from that of images and videos."""
    waiting = _by_placeholder(ids, media, tokens)
    result = array("i")  # what is between placeholders is copied at once: a loop over a long prompt would block others
    items: list[MediaItem] = []
    begin = 0
    places = [np.flatnonzero(ids == placeholder) for placeholder in waiting]
    for place in np.sort(np.concatenate(places)).tolist():
        entry = waiting[int(ids[place])].popleft()
        has_start = entry.kind == "video" and place > begin and ids[place - 1] == tokens.start
        result.frombytes(ids[begin : place - has_start].tobytes())
        _place(entry, tokens, result, items)
        has_end = has_start and place + 1 < len(ids) and ids[place + 1] == tokens.end
        begin = place + 1 + has_end
    result.frombytes(ids[begin:].tobytes())
    return np.array(result, np.int32), items


def _by_placeholder(ids: Ids, media: Sequence[PlacedMedia], tokens: MediaTokens) -> dict[int, deque[PlacedMedia]]:
    """Returns images and videos by their placeholder, in the order of the prompt; both may have one in common."""
    waiting: dict[int, deque[PlacedMedia]] = {}
    for kind in KINDS:
        token_of_kind = tokens.of(kind)
        if token_of_kind is not None and token_of_kind not in waiting:
            waiting[token_of_kind] = deque(entry for entry in media if tokens.of(entry.kind) == token_of_kind)
            count = int(np.count_nonzero(ids == token_of_kind))
            if count != len(waiting[token_of_kind]):
                raise _mismatch(kind, count, len(waiting[token_of_kind]), tokens)
    return waiting


def _place(media: PlacedMedia, tokens: MediaTokens, result: array[int], items: list[MediaItem]) -> None:
    runs: list[tuple[int, int]] = []
    placeholder = array("i", [tokens.image if media.kind == "image" else tokens.video_frame])
    before, after = ([] if mark is None else [mark] for mark in (tokens.run_start, tokens.run_end))
    for part in media.parts:
        if isinstance(part, int):
            result.extend(before)
            count = part - len(result) % (tokens.fill + 1)
            runs.append((len(result), len(result) + count))
            result.extend(placeholder * count)
            result.extend(after)
        else:
            result.extend(part)
    for features in media.items:
        spans, runs = runs[: features.num_runs], runs[features.num_runs :]
        items.append(
            MediaItem(
                kind=media.kind,
                digest=features.digest,
                spans=spans,
                grid=features.grid,
                pixels=features.pixels,
                frame_seconds=features.frame_seconds,
            )
        )


def _mismatch(kind: Kind, num_placeholders: int, num_media: int, tokens: MediaTokens) -> RequestError:
    if num_placeholders > num_media:
        return RequestError(
            f"The prompt has {num_placeholders} placeholders for {kind}s (token {tokens.of(kind)}), but {num_media} "
            f"{kind}s came with it; send as many, and do not write the placeholder as text."
        )
    return RequestError(
        f"{num_media} {kind}s came with a prompt that has {num_placeholders} placeholders for them (token "
        f"{tokens.of(kind)}); write one for each, or send a conversation to /v1/chat/completions."
    )


def moved(items: Sequence[MediaItem], offset: int, tokens: MediaTokens | None) -> list[MediaItem]:
    """Returns the same items, shifted by `offset` tokens. Raises RequestError if images fill the prompt before them to
    a multiple that this changes."""
    if items and tokens is not None and offset % (tokens.fill + 1):
        raise RequestError(
            f"This model's images begin at multiples of {tokens.fill + 1} tokens, and the tokens that the session has"
            " before this one end elsewhere; send the whole conversation, without session_params."
        )
    return [
        msgspec.structs.replace(item, spans=[(start + offset, end + offset) for start, end in item.spans])
        for item in items
    ]


def whole_items(items: Sequence[MediaItem], length: int) -> list[MediaItem]:
    """Returns the items of the first `length` tokens. Raises RequestError if that cuts an item."""
    if any(item.spans[0][0] < length < item.spans[-1][1] for item in items):
        raise RequestError(f"an image or a video lies across token {length}, where the prompt would be cut")
    return [item for item in items if item.spans[-1][1] <= length]
