"""Encoder steps: which images are encoded before which chunk of a prompt.

One request at a time has its images encoded, with a budget of patches in a step. While requests decode, an encoder step
is computed in slices: the first comes after the decode step during which its patches travel to the device, and a decode
step follows each slice, also before the prompt chunk. Chunks with images are kept short too, so that decoding requests
do not wait for a large image (`model_executor.media_pace`); a scheduler step never has both a slice and such a chunk.
An encoder step that has begun is finished before another one, whichever request waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.prompt_media import MediaMismatch, PromptMedia
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.utils.media_item import MediaItem

if TYPE_CHECKING:
    from sglang.srt.model_executor.media_features import MediaFeatures


class MediaRefused(ValueError):
    """Raised when the request cannot be served with these images; the text says why."""


class MediaSteps:
    """Schedules the encoder. `features` None: the model, or this server, reads text only."""

    def __init__(self, features: MediaFeatures | None, max_at_once: Callable[[], int], page_size: int) -> None:
        """max_at_once(): tokens of one prompt that a step can always compute. page_size: chunks end at page
        boundaries."""
        self.features, self.max_at_once, self._page = features, max_at_once, page_size
        self._num_decodes = 0
        self._tokens: int | None = None
        """Of prompts with images that the step which is chosen may take; None: as many as there are."""
        self._tokens_left: int | None = None
        self._was_busy = False
        """True if an encoder step comes before the step that is chosen, and requests wait for it."""
        self._has_chunk = False
        """True if the step that is chosen takes features."""
        self._in_step: dict[bytes, int] = {}
        """Bytes of the items that the step which is chosen takes features of, by digest."""

    def plan_prompt(self, msg: TokenizedGenerateReq) -> PromptMedia | None:
        """Returns the media of a request, None without any. Raises MediaRefused."""
        if not msg.media:
            return None
        features = self.features
        if features is None:
            raise MediaRefused("This server reads text only, no images.")
        try:
            media = PromptMedia(msg.media, len(msg.input_ids), features.description)
        except MediaMismatch as error:
            raise MediaRefused(f"The images do not fit the prompt: {error}.") from None
        if media.both_ways and media.longest_run > self.max_at_once():
            raise MediaRefused(
                f"An image has {media.longest_run} tokens that see one another, and a step of this server computes"
                f" {self.max_at_once()} of a prompt beside others; raise --chunked-prefill-size to twice as many as"
                " those of the image, or send a smaller image."
            )
        largest = max(map(features.size_of, msg.media))
        if largest > features.budget:
            raise MediaRefused(
                f"An image or a video takes {largest >> 20} MiB of features, and this server holds"
                f" {features.budget >> 20} MiB; send a smaller one."
            )
        return media

    def begin(self, num_decodes: int) -> None:
        """Resets the budget for a new step, for which `num_decodes` decoding requests would wait."""
        self._was_busy = self._has_chunk = False
        self._in_step = {}
        self._num_decodes = num_decodes
        if self.features is not None:
            self._tokens = self.features.pace.prompt_tokens(num_decodes) if num_decodes else None
            self._tokens_left = self._tokens

    def ready(self, req: Req, begin: int, count: int) -> int:
        """Returns how many of `count` tokens from `begin` may be computed now; 0: their images are being encoded, or
        the step is long enough."""
        if req.media is None or self.features is None:
            return count
        decoding = self._num_decodes > 0
        count = self._short_enough(req.media, begin, req.media.uncut_end(begin, begin + count) - begin)
        items = self._fitting(req.media, begin, begin + count)
        further = [rows.item for rows in req.media.needed(begin, begin + count)[len(items) :]]
        end = req.media.first_token(further[0], begin) if further else begin + count
        self.features.pin(items, req.rid)
        missing = list({item.digest: item for item in items if item not in self.features}.values())
        if decoding and (self._was_busy if items and not missing else missing and self._has_chunk):
            return 0
        waits = bool(missing) and decoding
        while missing:
            if self._was_busy:
                return 0
            self._was_busy = decoding
            if not self.features.is_encoding:
                self.features.begin(missing[: _num_fitting(missing)], self._num_decodes)
                if decoding:
                    return 0  # the patches are copied to the device while others decode
            self.features.advance(whole=not decoding)
            self.features.pin(missing, req.rid)
            missing = [item for item in missing if item not in self.features]
        if waits:
            return 0
        count = req.media.uncut_end(begin, end) - begin
        self._has_chunk = self._has_chunk or bool(items)
        if self._tokens_left is not None:
            self._tokens_left -= count
        return count

    def computed(self, req: Req) -> None:
        """Unpins features that only the first `kv_len` tokens of a request need, once the step that computes these is
        launched."""
        if req.media is not None and self.features is not None:
            self.features.unpin((item for item in req.media.items if item.spans[-1][1] <= req.kv_len), req.rid)

    def end(self, req: Req) -> None:
        """Unpins the features of a request that has ended or goes back to the queue."""
        if req.media is not None and self.features is not None:
            self.features.unpin(req.media.items, req.rid)

    def _short_enough(self, media: PromptMedia, begin: int, count: int) -> int:
        """Returns how many tokens of a chunk with images fit the step's pace. A run that must not be cut is taken whole
        if it is the step's first."""
        if self._tokens_left is None or count <= self._tokens_left or not media.needed(begin, begin + count):
            return count
        untouched = self._tokens_left == self._tokens
        fewer = max(self._page * untouched, self._tokens_left // self._page * self._page)
        if fewer <= 0:
            return 0
        end = media.uncut_end(begin, begin + min(fewer, count))
        if end == begin and untouched:
            end = media.run_end(begin)
        return end - begin

    def _fitting(self, media: PromptMedia, begin: int, end: int) -> list[MediaItem]:
        """Returns the leading items of a chunk whose features fit the budget together with those that the step already
        takes. A single item always fits."""
        assert self.features is not None
        items: list[MediaItem] = []
        left = self.features.budget - sum(self._in_step.values())
        for rows in media.needed(begin, end):
            if rows.item.digest not in self._in_step:
                size = self.features.size_of(rows.item)
                if size > left:
                    break
                self._in_step[rows.item.digest] = size
                left -= size
            items.append(rows.item)
        return items


def _num_fitting(items: list[MediaItem]) -> int:
    """Returns how many of the items fit one encoder step."""
    patches = 0
    for number, item in enumerate(items):
        frames, rows, columns = item.grid
        patches += frames * rows * columns
        if number and patches > PATCHES_A_STEP:
            return number
    return len(items)
