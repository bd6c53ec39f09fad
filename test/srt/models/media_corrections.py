"""What the classes of transformers 5.17 need to see as the published models do, and as those of 5.24 do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import parse

if TYPE_CHECKING:
    import transformers


def take_clips_one_by_one(model: transformers.PreTrainedModel) -> None:
    """For Kimi K2.5, whose class takes several clips only if all have one frame."""
    model.model.get_image_features = partial(_clip_by_clip, model.model)


def _clip_by_clip(model: Any, pixels: torch.Tensor, grids: torch.Tensor, **_: Any) -> Any:
    parts = pixels.split(grids.prod(1).tolist())
    pooled = [model.vision_tower(part, grid[None]).pooler_output for part, grid in zip(parts, grids, strict=True)]
    return SimpleNamespace(pooler_output=[model.mm_projector(clip).flatten(0, -2) for clip in pooled])


def see_apart_by_three_axes(model: transformers.PreTrainedModel) -> None:
    """For MiniMax-M3, whose class sees with the eyes of another model before transformers 5.23: patches turned by row
    and column alone, and those of all pictures saw one another."""
    tower = model.model.vision_tower
    if hasattr(tower, "merge_temporal"):
        return
    tower.rotary_emb.forward = partial(_by_three_axes, tower.config)
    tower.forward = partial(_one_after_another, tower.forward)


def _by_three_axes(config: Any, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [P, 3]: time, row and column, each of which turns a third of a head's pairs."""
    pairs = config.hidden_size // config.num_attention_heads // 6
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(pairs) / pairs)
    angles = (positions[..., None] * frequencies).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def _one_after_another(see: Callable[..., Any], pixel_values: torch.Tensor, grid_thw: torch.Tensor, **_: Any) -> Any:
    parts = pixel_values.split(grid_thw.prod(1).tolist())
    seen = [see(part, grid[None]).last_hidden_state for part, grid in zip(parts, grid_thw, strict=True)]
    return SimpleNamespace(last_hidden_state=torch.cat(seen, dim=1), hidden_states=None, attentions=None)


def turn_by_column_first(model: transformers.PreTrainedModel) -> None:
    """For Step-3.7, whose class turns the first half of a head's pairs by the row before transformers 5.23."""
    rotary, by_row_and_column = model.model.vision_model.rotary_emb, torch.tensor([[[0.0], [1.0]]])
    if not rotary.recomposition_frequencies(by_row_and_column)[0, 0]:
        rotary.recomposition_frequencies = _columns_first


def _columns_first(angles: torch.Tensor) -> torch.Tensor:
    return angles.flip(1).flatten(1).repeat(1, 2)


def place_frames_turned(model: transformers.PreTrainedModel) -> None:
    """For Muse-Glimmer, whose class places the patches of a frame that is not square as the model was trained since
    transformers 5.18."""
    import transformers

    if parse(transformers.__version__) < parse("5.18"):
        model.model.vision_tower.patch_embedder.register_forward_pre_hook(_turned)


def _turned(_: torch.nn.Module, args: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    pixel_values, grid_thw = args
    return pixel_values, grid_thw[:, [0, 2, 1]]


CORRECTIONS = {
    "kimi_k25": take_clips_one_by_one,
    "muse_glimmer": place_frames_turned,
    "minimax_m3_vl": see_apart_by_three_axes,
    "step3p7": turn_by_column_first,
}
