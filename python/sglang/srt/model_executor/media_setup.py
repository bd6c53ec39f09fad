"""Sets up images on a rank: the cache of features with its encoder, and the table of position offsets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.media_features import MediaEncoder, MediaFeatures
from sglang.srt.plan.media import FEATURE_BYTES
from sglang.srt.plan.plan import Plan

CreateEncoder = Callable[[Plan], MediaEncoder | None]
"""Creates the encoder of a model's images with its weights."""


def create_features(plan: Plan, state: DeviceState, create_encoder: CreateEncoder) -> MediaFeatures | None:
    """Creates the feature cache of `state`, and its position offsets for models whose images make RoPE positions differ
    from indices. Returns None for a model that reads text only."""
    model = plan.description
    if model.media is None:
        return None
    if model.media.sections:
        state.keep_position_deltas()
    width = model.hidden_size * (1 + model.media.deepstack_levels)
    encoder = create_encoder(plan) if model.encodes_media else None
    shared = plan.shares_encoder
    together = shared or model.media.tower.ranks > 1
    agreed: Callable[[bool], bool] = parallel_state.all_ranks_agree if together else bool
    dtype, sliced = getattr(torch, plan.dtype), model.media.tower.can_pause and not shared
    state.features = MediaFeatures(
        model.media, width, dtype, FEATURE_BYTES, plan.device, encoder, agreed=agreed, sliced=sliced
    )
    return state.features
