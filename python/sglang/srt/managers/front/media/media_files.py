"""Reference counts of shared arrays: each file is unlinked when no unfinished request holds it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.messages import Features
from sglang.srt.managers.wire.io_struct import MediaItem
from sglang.srt.utils import shared_array
from sglang.srt.utils.shared_array import SharedArray

SHARE = 0.5
"""Share of the file system that arrays may take."""


class MediaFiles:
    """Counts the holders of shared arrays."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.on_removal: Callable[[str], None] | None = None
        """Called with the name of each array that is unlinked."""
        self._holders: Counter[str] = Counter()
        self._num_bytes = 0
        system = os.statvfs(directory)
        self._max_bytes = int(system.f_blocks * system.f_frsize * SHARE)

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all arrays that are held."""
        return self._num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._holders

    def require_room(self) -> None:
        """Raises RequestError 503 if arrays take too much of the file system."""
        if self._num_bytes > self._max_bytes:
            raise RequestError(
                f"images of other requests take {self._num_bytes >> 20} MiB of shared memory now; try again later", 503
            )

    def hold(self, items: Sequence[MediaItem | Features]) -> None:
        """Adds a holder to the items' arrays."""
        for array in _arrays(items):
            if not self._holders[array.name]:
                self._num_bytes += shared_array.num_bytes(array)
            self._holders[array.name] += 1

    def release(self, items: Sequence[MediaItem | Features]) -> None:
        """Ends one `hold` of the items' arrays."""
        for array in _arrays(items):
            self._holders[array.name] -= 1
            if self._holders[array.name] <= 0:
                del self._holders[array.name]
                self._num_bytes -= shared_array.num_bytes(array)
                shared_array.remove(self.directory, array)
                if self.on_removal is not None:
                    self.on_removal(array.name)


def _arrays(items: Iterable[MediaItem | Features]) -> Iterator[SharedArray]:
    for item in items:
        yield item.pixels


def media_bytes(items: Iterable[MediaItem]) -> int:
    """Returns the bytes of the items' arrays."""
    return sum(map(shared_array.num_bytes, _arrays(items)))
