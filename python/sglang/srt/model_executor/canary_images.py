"""Images in the start-up check's prompts: random features in place of some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from sglang.srt.model_executor.media_features import MediaFeatures
from sglang.srt.model_executor.step import MediaTokens, StepInput
from sglang.srt.utils.media_item import MediaItem
from sglang.srt.utils.shared_array import SharedArray

COUNT, COLUMNS = 12, 4
"""Placeholders of a prompt, in rows of COLUMNS. They are its last tokens, whose logits reveal misplaced features."""
SCALE = 0.05
"""Standard deviation of the features, about that of embeddings."""


class CanaryImages:
    """The same image in every prompt, each starting at another row of its features."""

    def __init__(self, features: MediaFeatures, length: int, sections: bool) -> None:
        """length: tokens of each prompt, more than COUNT. sections: the model has M-RoPE positions."""
        self.features, self.length, self.sections = features, length, sections
        pixels, grid = SharedArray("", [], "float32"), (1, COUNT // COLUMNS, COLUMNS)
        span = (length - COUNT, length)
        self.item = MediaItem(kind="image", digest=bytes(32), spans=[span], grid=grid, pixels=pixels)

    @contextmanager
    def only_cached(self) -> Iterator[None]:
        """Makes the features the only cached ones inside the block."""
        generator = torch.Generator().manual_seed(0)
        rows = SCALE * torch.randn(COUNT, self.features.width, generator=generator)
        self.features.enter(self.item, rows.to(self.features.device, self.features.dtype))
        try:
            yield
        finally:
            self.features.clear()

    def put(self, step: StepInput) -> StepInput:
        """Returns the step of whole prompts with the image in them."""
        prompts, place, length, first = step.prompts, np.arange(COUNT), self.length, self.length - COUNT
        assert prompts is not None
        number = len(prompts.extend_lens)
        begins = length * np.arange(number)[:, None]
        tokens = (begins + first + place).flatten()
        positions = np.tile(np.arange(length), (3, number))
        positions[1, tokens] = np.tile(first + place // COLUMNS, number)
        positions[2, tokens] = np.tile(first + place % COLUMNS, number)
        ids = prompts.input_ids.copy()
        ids[tokens] = self.features.description.image_token or self.features.description.video_token or 0
        sources = [(self.item, np.roll(place, i)) for i in range(number)]
        media = MediaTokens(positions if self.sections else None, tokens, sources)
        return replace(step, prompts=replace(prompts, input_ids=ids, media=media))
