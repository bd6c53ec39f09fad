"""How a model prepares pictures and videos: what `processor.py` in the folder of a tower says."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from sglang.srt.towers.pictures.patches import MakePatches, Patches, Settings
from sglang.srt.towers.pictures.video_processor import VideoForm
from sglang.srt.towers.registry import PROCESSORS


@dataclass(frozen=True, slots=True)
class Views:
    """`patches` of each grid, in the order of their placeholders. `parts`: prompt text; a number stands for a run of
    that many placeholders, one run for each frame of a grid."""

    patches: list[Patches]
    parts: list[str | int]


MakeViews = Callable[[Settings, str], Callable[[Image.Image], Views]]
"""Takes the settings of images and the type of patches that `patch_types.as_type` names. Returns the function that
prepares a picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """How a model prepares pictures and videos.

    views: makes the function for images
    video: how videos are read; None: the model takes none
    counts_frames: limits of images count their pixels once for each of the frames that an image stands for
    keys: settings that stand in the whole config.json, for checkpoints without files of a processor
    of_config: settings of images that follow from the whole config.json, before those of files
    usual: renames settings of published files; raises UserError for those that are not supported
    check: raises UserError for settings of images that are not supported
    other_classes: processors that take the place of this one, by a part of `image_processor_type`
    """

    views: MakeViews
    video: VideoForm | None = None
    counts_frames: bool = False
    keys: Callable[[Mapping[str, Any]], Settings] | None = None
    of_config: Callable[[Mapping[str, Any]], Settings] | None = None
    usual: Callable[[Settings], Settings] = dict
    check: Callable[[Settings], None] | None = None
    other_classes: Mapping[str, str] = field(default_factory=dict)


def load_processor(name: str) -> Processor:
    """Returns the processor of a folder of `towers`."""
    processor = importlib.import_module(PROCESSORS[name]).PROCESSOR
    assert isinstance(processor, Processor)
    return processor


def one_view(make: MakePatches, before: str = "", after: str = "") -> MakeViews:
    """Returns views of models that see a picture once, between texts that the processor adds, if any."""

    def make_views(settings: Settings, dtype: str) -> Callable[[Image.Image], Views]:
        process = make(settings, dtype)

        def see(image: Image.Image) -> Views:
            patches: Patches = process(image)
            parts: list[str | int] = [before, patches.num_tokens, after]
            return Views([patches], [part for part in parts if part != ""])

        return see

    return make_views
