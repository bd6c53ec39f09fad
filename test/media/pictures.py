"""Files of images, good and bad."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 96, height: int = 64, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    values = np.stack([rows * 255 // max(1, height), columns * 255 // max(1, width), (rows + columns) % 256], -1)
    values = (values + rng.integers(0, 20, values.shape)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def animation(num_frames: int = 8, width: int = 64, height: int = 64, milliseconds: int = 250) -> bytes:
    """A GIF that changes from black to white."""
    frames = [Image.new("RGB", (width, height), (i * 255 // num_frames,) * 3) for i in range(num_frames)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=milliseconds)


def png_of_size(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says so much, with little or nothing behind it."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(data or bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
