"""Features of images and videos on the device, kept by their digests, and the encoder steps that make them.

Which are kept is decided by sizes and the order of calls, never by the device, so that all ranks decide alike, also
stages of a pipeline that have no encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from sglang.srt.plan.media import MediaDescription
from sglang.srt.utils import shared_array
from sglang.srt.utils.media_item import MediaItem


class MediaEncoder(Protocol):
    """Makes features of patches."""

    def encode(self, pixels: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """pixels [P, values of a patch] of items one after the other, whose grids are frames, rows, columns of patches.
        Returns of each item [tokens, hidden * (1 + deepstack levels)]."""


@dataclass(slots=True)
class _Entry:
    size: int  # bytes
    features: torch.Tensor | None = None  # None: of a stage without encoder, or the pixels were gone
    users: set[str] = field(default_factory=set)  # ids of the requests whose prompts still need it


class MediaFeatures:
    """A cache of features with a budget of bytes. Those that requests still need go last."""

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
    ) -> None:
        """width: of a placeholder's features. budget: in bytes. encoder: None in stages of a pipeline that use no
        features. directory: that of the shared arrays. agreed: whether all ranks that encode together say so."""
        self.description, self.width, self.dtype, self.budget = description, width, dtype, budget
        self.device, self.encoder, self.directory, self._agreed = device, encoder, directory, agreed
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """The least recently used first."""
        self.used = 0
        self.num_encoded = 0
        """Items that were encoded since the start."""

    def __contains__(self, item: MediaItem) -> bool:
        return item.digest in self._entries

    def size_of(self, item: MediaItem) -> int:
        return self.description.num_tokens(item.grid) * self.width * self.dtype.itemsize

    def usage(self) -> dict[str, int]:
        return {"items": len(self._entries), "bytes": self.used, "encoded": self.num_encoded}

    def pin(self, items: Iterable[MediaItem], rid: str) -> None:
        """A request uses those of the items that are there, and needs them until `unpin`."""
        for item in items:
            if item.digest in self._entries:
                self._entries.move_to_end(item.digest)
                self._entries[item.digest].users.add(rid)

    def unpin(self, items: Iterable[MediaItem], rid: str) -> None:
        for item in items:
            if item.digest in self._entries:
                self._entries[item.digest].users.discard(rid)

    def clear(self) -> None:
        """Forgets all features. Only while no request needs any."""
        self._entries.clear()
        self.used = 0

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> None:
        """Launches one encoder step over items that are not there; they take the place of others."""
        size = sum(map(self.size_of, items))
        self._make_room(size)
        for item, features in zip(items, self._computed(items), strict=True):
            self._entries[item.digest] = _Entry(self.size_of(item), features)
        self.used += size
        self.num_encoded += len(items)

    def rows(self, item: MediaItem, index: torch.Tensor) -> torch.Tensor:
        """Returns the rows `index` [N] of an item that is there, [N, hidden * (1 + deepstack levels)]."""
        entry = self._entries[item.digest]
        if entry.features is None:
            entry.features = self._computed([item])[0]
        if entry.features is None:  # the request has ended everywhere else: nobody reads what comes of it
            return torch.zeros((len(index), self.width), dtype=self.dtype, device=self.device)
        return entry.features[index]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        for pinned in (False, True):
            for digest in [digest for digest, entry in self._entries.items() if bool(entry.users) == pinned]:
                if self.used + size <= self.budget:
                    return
                self.used -= self._entries.pop(digest).size

    def _computed(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor | None]:
        """A rank that reads the pixels later than others may find them gone, when the request has ended: then the
        next request that brings the item computes it."""
        if self.encoder is None:
            return [None] * len(items)
        assert self.directory is not None
        pixels = []
        try:
            pixels = [np.asarray(shared_array.read(self.directory, item.pixels)) for item in items]
        except FileNotFoundError:
            pass
        if not self._agreed(bool(pixels)):
            return [None] * len(items) if len(items) == 1 else [self._computed([item])[0] for item in items]
        patches = torch.from_numpy(np.concatenate(pixels)).to(self.device, non_blocking=True)
        return self.encoder.encode(patches, [item.grid for item in items])
