"""Image inputs of graphs with prompts, at fixed addresses, which steps without images use as well.

A graph of a model with images has a feature row for each of its tokens, and a mask of those that replace embeddings;
likewise M-RoPE positions. So one graph serves steps with and without images. What that costs a step
of text is some ten launches inside its graph and the bytes of 3 rows of H for each token and of 3 for each level: of
Qwen3-VL-8B with 640 tokens 63 MB and with 64 tokens 6 MB, predicted to be 45 us of 16 ms and 25 us of 7 ms. Graphs of
their own for steps with images would cost text nothing, and for the 37 shapes of that model 0.4 GiB of launch records
and twice the time of the capture. Graphs without prompts have nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.input_rows import MaskedRows
from sglang.srt.layers.rotary_embedding import SectionPositions
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.media_features import MediaFeatures
from sglang.srt.model_executor.step import StepInput
from sglang.srt.utils.device_arrays import DeviceArrays, Field, send

SECTIONS = 3


@dataclass(slots=True)
class FeatureRows:
    """Feature rows of a graph: `buffer` [T, hidden * (1 + deepstack levels)] is zero except at the placeholders of the
    last step, all of which are among the first `used` tokens."""

    features: MediaFeatures
    buffer: torch.Tensor
    used: int = 0

    def load(self, step: StepInput) -> None:
        """Launches copies of a step's features into the buffer, and clears those of the step before."""
        if self.used:
            self.buffer[: self.used].zero_()
            self.used = 0
        media = None if step.prompts is None else step.prompts.media
        if media is None or not media.sources:
            return
        tokens, rows = media.tokens + step.num_decodes, np.concatenate([rows for _, rows in media.sources])
        sent = send(self.buffer.device, tokens=tokens, rows=rows)
        self.buffer.index_copy_(0, sent["tokens"], self.features.gather_features(media.sources, sent["rows"]))
        self.used = int(tokens.max()) + 1


class GraphMedia:
    """The image inputs of a runner's graphs with prompts."""

    def __init__(self, state: DeviceState, num_tokens: int) -> None:
        """num_tokens: of the largest graph. A pipeline stage without an encoder has positions only. Images that attend
        in both directions have none of this, since steps with them have no graph."""
        self.num_tokens, self.sections = num_tokens, state.position_deltas is not None
        self.rows: FeatureRows | None = None
        features = state.features
        if features is not None and features.encoder is not None and not features.description.both_ways:
            buffer = torch.zeros((num_tokens, features.width), dtype=features.dtype, device=state.device)
            self.rows = FeatureRows(features, buffer)

    def fields(self) -> dict[str, Field]:
        """Returns the additional input fields of steps with prompts."""
        fields = {}
        if self.rows is not None:
            fields["is_media"] = Field((self.num_tokens,), np.bool_)
        if self.sections:
            fields["sections"] = Field((SECTIONS, self.num_tokens), np.int64)
            fields["in_sections"] = Field((self.num_tokens,), np.bool_)
        return fields

    def load(self, step: StepInput) -> dict[str, np.ndarray]:
        """Launches the work before the replay of a step with prompts; returns the values of the fields."""
        if self.rows is not None:
            self.rows.load(step)
        media = None if step.prompts is None else step.prompts.media
        if media is None:
            return {}
        values: dict[str, np.ndarray] = {}
        count, num_decodes = len(step.out_cache_loc), step.num_decodes
        if self.rows is not None:
            values["is_media"] = np.zeros(count, np.bool_)
            values["is_media"][media.tokens + num_decodes] = True
        if media.positions is not None:
            values["sections"] = np.pad(media.positions, ((0, 0), (num_decodes, 0)))
            values["in_sections"] = np.arange(count) >= num_decodes
        return values

    def add_to(self, batch: ForwardBatch, arrays: DeviceArrays) -> None:
        """Adds the image inputs to a batch under capture."""
        count = len(batch.input_ids)
        if self.rows is not None:
            rows, *added = self.rows.features.split(self.rows.buffer[:count])
            batch.embedding_rows = MaskedRows(arrays["is_media"][:count], rows, tuple(added))
        if self.sections:
            assert isinstance(batch.mrope_positions, torch.Tensor)
            values = torch.where(arrays["in_sections"][:count], arrays["sections"][:, :count], batch.mrope_positions)
            batch.mrope_positions = SectionPositions(values)
