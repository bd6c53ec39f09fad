"""Prepares pictures and videos with the processors of the towers, as the process that decodes them does."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from sglang.srt.towers.pictures.patches import ImageProcessor
from sglang.srt.towers.pictures.processor import Views, load_processor
from sglang.srt.towers.pictures.processor_files import ProcessorFiles
from sglang.srt.towers.pictures.video_processor import VideoProcessor


def image_views(files: ProcessorFiles, dtype: str = "float32") -> Callable[[Image.Image], Views]:
    return load_processor(files.family).views(files.image, dtype)


def image_processor(files: ProcessorFiles, dtype: str = "float32") -> ImageProcessor:
    """Of a model that sees a picture once."""
    see = image_views(files, dtype)

    def patches(image: Image.Image):  # type: ignore[no-untyped-def]
        (only,) = see(image).patches
        return only

    return patches


def video_processor(files: ProcessorFiles) -> VideoProcessor:
    form = load_processor(files.family).video
    assert form is not None
    return VideoProcessor(form, files.video)
