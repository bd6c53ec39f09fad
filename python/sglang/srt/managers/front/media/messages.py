"""Messages between the front and the decoding processes, as MessagePack."""

from __future__ import annotations

import msgspec

from sglang.srt.utils.shared_array import SharedArray


class MediaJob(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One image or video to decode. `name`: prefix of the names of its arrays."""

    name: str
    kind: str
    data: bytes
    is_base64: bool = False
    mime: str = ""
    detail: str | None = None


class Features(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The encoder's input for `num_runs` runs of placeholders."""

    grid: tuple[int, int, int]
    pixels: SharedArray
    digest: bytes
    num_runs: int = 1
    frame_seconds: float = 0.0


class Decoded(msgspec.Struct, tag=True, kw_only=True):
    """A decoded image or video. `parts`: prompt tokens and texts that replace the placeholder; a number stands for a
    run of that many placeholders."""

    items: list[Features]
    parts: list[str | int]

    def arrays(self) -> list[SharedArray]:
        """Returns the shared arrays of the items' pixels."""
        return [item.pixels for item in self.items]


class Refused(msgspec.Struct, tag=True):
    """A job that failed. `is_overload`: the server, not the file, is the reason."""

    message: str
    is_overload: bool = False


class Ready(msgspec.Struct, tag=True):
    """First message of a worker."""


Reply = Decoded | Refused | Ready
