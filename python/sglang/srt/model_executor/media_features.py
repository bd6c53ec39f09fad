"""Features of images and videos on the device, cached by digest, and the encoder steps that compute them.

Evictions depend on sizes and the order of calls only, never on the device, so that all ranks agree, pipeline stages
without an encoder included.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from sglang.srt.model_executor.media_pace import WHOLE, MediaPace
from sglang.srt.model_executor.patch_uploads import PatchReader, PatchUploads
from sglang.srt.plan.media import MediaDescription
from sglang.srt.towers.base.encoder import PatchPart, Pieces, whole
from sglang.srt.towers.base.patch_places import Grid, num_patches
from sglang.srt.towers.base.pieces import WHOLE_LAYERS, Cuts
from sglang.srt.utils import shared_array
from sglang.srt.utils.media_item import MediaItem

logger = logging.getLogger(__name__)


class MediaEncoder(Protocol):
    """An encoder that computes features from patches."""

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Returns the features of each item, [tokens, hidden * (1 + deepstack levels)]. pixels [P, values per patch],
        on host or device, holds the items one after the other; a grid gives an item's frames, rows and columns of
        patches."""


@runtime_checkable
class LayeredEncoder(MediaEncoder, Protocol):
    """An encoder whose computation can pause after every piece (`towers.base.pieces`)."""

    def parts(self, grids: Sequence[Grid]) -> list[list[Grid]]:
        """Returns the clips of all items, grouped by the parts in which they are computed."""

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """Returns host arrays that the layers need about the patch positions of a part. Callable from any thread."""

    def encoding(
        self, parts: Iterable[PatchPart], grids: Sequence[Grid], cuts: Cuts = WHOLE_LAYERS
    ) -> Pieces[list[torch.Tensor]]:
        """Yields after every piece, and returns what `encode` returns."""


@dataclass(slots=True)
class _CachedItem:
    size: int  # bytes
    features: torch.Tensor | None = None  # None: of a stage without encoder, or the pixels were gone
    users: set[str] = field(default_factory=set)  # ids of the requests whose prompts still need it
    failed: bool = False  # the encoder did; it tries again for each step that needs the features


@dataclass(slots=True)
class _EncoderStep:
    """An encoder step in progress. `slices` holds the number of pieces of each slice that is left. `pieces` is None if
    nothing is computed before the last slice, which then reads the patches itself."""

    items: Sequence[MediaItem]
    slices: deque[int]
    pieces: Pieces[list[torch.Tensor]] | None


class MediaFeatures:
    """A cache of features with a budget in bytes. It evicts least recently used items first, pinned ones last."""

    def __init__(
        self,
        description: MediaDescription,
        width: int,
        dtype: torch.dtype,
        budget: int,
        device: torch.device | str,
        encoder: MediaEncoder | None,
        directory: Path | None = None,
        agreed: Callable[[bool], bool] = bool,
        sliced: bool = True,
    ) -> None:
        """width: of a placeholder's features, deepstack levels included. budget: bytes. encoder: None in pipeline
        stages that use no features. directory: where shared arrays lie. agreed: returns whether it is true on all ranks
        that encode together. sliced: whether an encoder step may be spread over several steps."""
        self.description, self.width, self.dtype, self.budget = description, width, dtype, budget
        self.device, self.encoder, self.directory, self._agreed = device, encoder, directory, agreed
        self._sliced = sliced
        self.pace = MediaPace()
        self._uploads: PatchUploads | None = None
        if isinstance(encoder, LayeredEncoder):
            tower = description.tower
            pixel_dtype = getattr(torch, tower.pixel_dtype(str(dtype).removeprefix("torch.")))
            self._uploads = PatchUploads(tower.patch_values, pixel_dtype, device)
        self._under_way: _EncoderStep | None = None
        self._entries: OrderedDict[bytes, _CachedItem] = OrderedDict()
        """The least recently used first."""
        self.used = 0
        """Bytes of the cached items and of those that the encoder step in progress computes."""
        self.num_encoded = 0
        """Items that were encoded since the start."""

    def empty_copy(self) -> MediaFeatures:
        """Returns an empty cache that evicts as this one does, for requests that other ranks compute."""
        return MediaFeatures(
            self.description, self.width, self.dtype, self.budget, self.device, None, sliced=self._sliced
        )

    def __contains__(self, item: MediaItem) -> bool:
        return item.digest in self._entries

    def size_of(self, item: MediaItem) -> int:
        """Returns the bytes of an item's features."""
        return self.description.num_tokens(item.grid) * self.width * self.dtype.itemsize

    def usage(self) -> dict[str, int]:
        """Returns the number of cached items, their bytes, and the items encoded since the start."""
        return {"items": len(self._entries), "bytes": self.used, "encoded": self.num_encoded}

    def pin(self, items: Iterable[MediaItem], rid: str) -> None:
        """Marks the cached ones of `items` as used by request `rid`, until `unpin`."""
        for item in items:
            if item.digest in self._entries:
                self._entries.move_to_end(item.digest)
                self._entries[item.digest].users.add(rid)

    def unpin(self, items: Iterable[MediaItem], rid: str) -> None:
        """Ends the use of `items` by request `rid`."""
        for item in items:
            if item.digest in self._entries:
                self._entries[item.digest].users.discard(rid)

    def clear(self) -> None:
        """Drops all features. Only allowed while no request needs any."""
        self._entries.clear()
        self._under_way = None
        self.used = 0

    def enter(self, item: MediaItem, features: torch.Tensor) -> None:
        """Adds features [tokens, hidden * (1 + deepstack levels)] of an item that is neither cached nor being
        encoded."""
        self._entries[item.digest] = _CachedItem(self.size_of(item), features)
        self.used += self.size_of(item)

    @property
    def is_encoding(self) -> bool:
        """Returns whether an encoder step has begun and not ended."""
        return self._under_way is not None

    def begin(self, items: Sequence[MediaItem], num_decodes: int = 0) -> None:
        """Begins an encoder step over items that are not cached: others are evicted, so that there is room for the
        features before any are computed, the patches are sent to the device, and `advance` computes them.
        num_decodes: requests that decode meanwhile; with more of them a step is cut into more slices."""
        size = sum(map(self.size_of, items))
        self._make_room(size)
        self.used += size
        tower, grids = self.description.tower, [item.grid for item in items]
        slices = self.pace.slices(tower, grids, num_decodes) if self._sliced and num_decodes else WHOLE
        self._under_way = _EncoderStep(items, deque(slices.pieces), self._pieces_of(items, slices.cuts))

    @torch.inference_mode()
    def advance(self, whole: bool) -> None:
        """Launches the next slice of the encoder step, or with `whole` all of its rest. After the last slice the items
        are cached. All ranks count slices alike, those without encoder included."""
        step = self._under_way
        assert step is not None
        count = step.slices.popleft()
        last = whole or not step.slices
        sliced: Sequence[torch.Tensor | None] | None = None
        try:
            sliced = None if step.pieces is None else _continued(step.pieces, None if last else count)
        except Exception:
            self._survive_failure()
            step.pieces = None  # the last slice computes everything
        if not last:
            return
        self._under_way = None
        computed, failed = (sliced, False) if sliced is not None else self._tried(step.items)
        for item, features in zip(step.items, computed, strict=True):
            self._entries[item.digest] = _CachedItem(self.size_of(item), features, failed=failed)
        self.num_encoded += len(step.items)

    def rows(self, item: MediaItem, index: torch.Tensor) -> torch.Tensor:
        """Returns rows `index` [N] of a cached item, [N, hidden * (1 + deepstack levels)]."""
        entry = self._entries[item.digest]
        if entry.features is None:
            (entry.features,), entry.failed = self._tried([item])
        if entry.failed:  # the logits are NaN then, which ends the request with an error
            return torch.full((len(index), self.width), torch.nan, dtype=self.dtype, device=self.device)
        if entry.features is None:  # the request has ended everywhere else: nobody reads what comes of it
            return torch.zeros((len(index), self.width), dtype=self.dtype, device=self.device)
        return entry.features[index]

    def gather_features(self, sources: Sequence[tuple[MediaItem, np.ndarray]], index: torch.Tensor) -> torch.Tensor:
        """Returns features [M, hidden * (1 + deepstack levels)]. sources: cached items, each with the rows that the
        step takes; index [M]: all these rows on the device."""
        begin, parts = 0, []
        for item, rows in sources:
            parts.append(self.rows(item, index[begin : begin + len(rows)]))
            begin += len(rows)
        return torch.cat(parts)

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits rows [N, hidden * (1 + deepstack levels)] into the token features [N, hidden] and those of each
        deepstack level."""
        return rows.split(self.width // (1 + self.description.deepstack_levels), dim=1)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        for pinned in (False, True):
            for digest in [digest for digest, entry in self._entries.items() if bool(entry.users) == pinned]:
                if self.used + size <= self.budget:
                    return
                self.used -= self._entries.pop(digest).size

    def _pieces_of(self, items: Sequence[MediaItem], cuts: Cuts) -> Pieces[list[torch.Tensor]] | None:
        """Returns the items' computation, which pauses after every piece; None if the encoder cannot pause or pixels
        are gone."""
        if self._uploads is None or not isinstance(self.encoder, LayeredEncoder):
            return None
        reader, grids = self._reader(items), [item.grid for item in items]
        if not self._agreed(reader is not None) or reader is None:
            return None
        parts = self._uploads.send(reader, self.encoder.parts(grids), self.encoder.places)
        return self.encoder.encoding(parts, grids, cuts)

    def _reader(self, items: Sequence[MediaItem]) -> PatchReader | None:
        """Returns a reader of the items' patches, whose files may be unlinked from then on; None if pixels of one are
        gone."""
        assert self.directory is not None
        try:
            files = [shared_array.opened(self.directory, item.pixels) for item in items]
        except FileNotFoundError:
            return None
        return PatchReader(files, [item.pixels for item in items])

    def _tried(self, items: Sequence[MediaItem]) -> tuple[Sequence[torch.Tensor | None], bool]:
        """Computes the items' features at once; returns None for each, and True, if the encoder fails."""
        try:
            return self._computed(items), False
        except Exception:
            self._survive_failure()
            return [None] * len(items), True

    def _survive_failure(self) -> None:
        """Lets the requests fail whose features an encoder does not compute, and the server go on; but raises the error
        again where other ranks wait for this one's part. A GPU that computes nothing any more ends the next step."""
        if self._agreed is not bool:
            raise
        logger.exception("The encoder of images failed; requests with what it was to compute get an error")

    def _computed(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor | None]:
        """Computes the items' features at once; None for items whose pixels are gone. A rank that reads late may miss
        pixels of a request that has ended: the next request with the item computes it again."""
        if self.encoder is None:
            return [None] * len(items)
        reader, grids = self._reader(items), [item.grid for item in items]
        if not self._agreed(reader is not None) or reader is None:
            return [None] * len(items) if len(items) == 1 else [self._computed([item])[0] for item in items]
        tower = self.description.tower
        dtype = getattr(torch, items[0].pixels.dtype)
        values = torch.empty(num_patches(grids), tower.patch_values, dtype=dtype)
        reader.fill(values.view(-1))
        return self.encoder.encode(values, grids)


def _continued(pieces: Pieces[list[torch.Tensor]], count: int | None) -> list[torch.Tensor] | None:
    """Computes `count` pieces and returns None, or computes all remaining pieces (count None) and returns the
    features."""
    if count is None:
        return whole(pieces)
    for _ in range(count):
        next(pieces)
    return None
