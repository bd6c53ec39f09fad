"""Decodes images and videos to pixels, in a worker process, so that a malicious file can harm that process only.

Raises MediaError, which says what a client can do about it.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sglang.srt.towers.pictures.video import MAX_FRAMES, MAX_PIXELS, MediaError, Video, check_size

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")
MAX_VIDEO_PIXELS = 1 << 33
"""Pixels of all frames of a file."""
LOW_DETAIL_SIDE = 512
_DEFAULT_FRAME_MS = 100
_HEAD_BYTES = 512
SAMPLED_FPS = 2.0
"""Frames per second that are assumed for a video sent as single pictures."""

Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.simplefilter("error", Image.DecompressionBombWarning)


def file_bytes(data: bytes, is_base64: bool, max_bytes: int) -> bytes:
    """Returns the file of a payload, decoding base64. Raises MediaError if it is too large."""
    if not is_base64:
        return data
    try:
        decoded = base64.b64decode(data.translate(None, b" \t\r\n"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the data of an image or a video is not base64: {error}") from None
    if len(decoded) > max_bytes:
        raise MediaError(f"an image or a video has more than {max_bytes >> 20} MiB (--media-url-max-file-size-mb)")
    return decoded


def decode_image(data: bytes, detail: str | None = None) -> Image.Image:
    """Returns the picture in RGB, upright; the first one if the file has several. Transparent pixels become white."""
    with _opened(data) as image:
        check_size(image.size)
        picture = _loaded(image)
    if detail == "low":
        picture.thumbnail((LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))
    return picture


def _opened(data: bytes) -> Image.Image:
    if not data:
        raise MediaError("an image or a video has no data")
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaError(f"an image has more than {MAX_PIXELS} pixels; send a smaller one") from None
    except UnidentifiedImageError:
        raise MediaError(_unknown(data)) from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise anything for malicious files
        raise MediaError(f"an image cannot be read: {error}") from None


def _unknown(data: bytes) -> str:
    head = data[:_HEAD_BYTES].lstrip().lower()
    if b"<svg" in head:
        return "an image is an SVG drawing, which must be sent as pixels: a PNG, for example"
    if head.startswith((b"<!doctype", b"<html")):
        return "an image is a web page; give the URL of the picture itself"
    return f"an image is in no format that is read here: {', '.join(FORMATS)}"


def _loaded(image: Image.Image) -> Image.Image:
    try:
        image.load()
        return _rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaError(f"an image has more than {MAX_PIXELS} pixels; send a smaller one") from None
    except Exception as error:
        raise MediaError(f"an image is damaged or cut off: {error}") from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, which a plain conversion would clip at 255
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


# --- videos -----------------------------------------------------------------------------------------------------------


class Pictures(Video):
    """A video sent as already sampled pictures, `data:video/jpeg;base64,PICTURE,PICTURE,...`."""

    is_sampled = True

    def __init__(self, files: list[bytes]) -> None:
        self._files = files
        if len(files) > MAX_FRAMES:
            raise MediaError(f"a video has {len(files)} frames; 1 to {MAX_FRAMES} are read")
        with _opened(files[0]) as first:
            super().__init__(len(files), SAMPLED_FPS, first.size)

    def frames(self, indices: list[int]) -> Iterator[Image.Image]:
        for index in indices:
            yield decode_image(self._files[index])


class Animation(Video):
    """A video in an animated GIF, WebP, PNG or AVIF file."""

    is_sampled = False

    def __init__(self, image: Image.Image) -> None:
        self._image: Any = image
        try:
            count = int(getattr(image, "n_frames", 1))
        except MemoryError:
            raise
        except Exception as error:
            raise MediaError(f"a video is damaged or cut off: {error}") from None
        milliseconds = float(image.info.get("duration") or _DEFAULT_FRAME_MS)
        super().__init__(count, 1000.0 / max(1.0, milliseconds), image.size)
        if count * image.width * image.height > MAX_VIDEO_PIXELS:
            raise MediaError(f"a video has more than {MAX_VIDEO_PIXELS} pixels in all frames; send a smaller one")

    def frames(self, indices: list[int]) -> Iterator[Image.Image]:
        for index in indices:
            try:
                self._image.seek(index)
                frame = self._image.copy()
            except MemoryError:
                raise
            except Exception as error:
                raise MediaError(f"a video is damaged or cut off at frame {index}: {error}") from None
            yield _loaded(frame)


def open_animation(data: bytes) -> Video:
    """Opens an animated picture. Raises MediaError."""
    try:
        return Animation(_opened(data))
    except MediaError as error:
        if "no format" not in str(error):
            raise
    raise MediaError(
        "a video is in no format that is read here: send an MP4, WebM, MKV or MOV, an animated GIF, WebP, PNG or AVIF,"
        " or its frames as data:video/jpeg;base64,FRAME,FRAME,..."
    )
