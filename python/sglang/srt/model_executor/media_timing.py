"""Measures the times that `media_pace` needs, at start-up. Collective: the ranks use the longest time of any of
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.media_features import MediaFeatures
from sglang.srt.model_executor.media_pace import LayerTimes, MediaPace, measured_layer
from sglang.srt.towers.base.encoder import VisionEncoder, whole
from sglang.srt.towers.base.patch_places import Grid, num_patches

PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)


class Runner(Protocol):
    """The parts of a model runner that are measured."""

    media: MediaFeatures | None

    @property
    def longest_prompt(self) -> int:
        """Returns the most tokens that `run_padding` accepts."""

    def step_times(self) -> dict[tuple[int, int], float]:
        """Returns (requests, tokens per request) -> milliseconds of a step in a graph."""

    def media_prompt_times(self) -> dict[int, float]:
        """Returns tokens -> milliseconds of a step with images in a graph; empty if they have no graphs."""

    def run_padding(self, num: int, prefix: int = 0) -> None:
        """Computes a prompt of `num` padding tokens behind `prefix` cached ones."""


@torch.inference_mode()
def measured_pace(runner: Runner) -> MediaPace:
    """Returns the pace of a runner whose graphs are captured; without limits if decode steps have no graphs."""
    assert runner.media is not None
    decode: dict[int, float] = {}
    for (size, _), ms in runner.step_times().items():
        decode[size] = min(ms, decode.get(size, ms))
    if not decode:
        return MediaPace()
    in_graphs = runner.media_prompt_times()
    sizes = sorted(in_graphs) or [tokens for tokens in PROMPT_TOKENS if tokens <= runner.longest_prompt]
    prompt = [in_graphs.get(size) or _milliseconds(partial(runner.run_padding, size)) for size in sizes]
    encoder = runner.media.encoder
    layer = layer_times(encoder) if isinstance(encoder, VisionEncoder) else None  # others are not cut into slices
    measured = [*prompt, *(() if layer is None else (layer.patch, layer.pair, layer.least))]
    agreed = _max_over_ranks(measured)
    if layer is not None:
        layer = LayerTimes(*agreed[len(sizes) :])
    return MediaPace(layer, decode, dict(zip(sizes, agreed, strict=False)), in_graphs=bool(in_graphs))


def layer_times(encoder: VisionEncoder[Any]) -> LayerTimes:
    """Measures the encoder of this rank."""
    tower = encoder.tower

    def time_step(grids: Sequence[Grid]) -> float:
        pixels = torch.zeros(num_patches(grids), tower.patch_values, dtype=encoder.dtype, device=encoder.device)
        parts = list(encoder.sent(pixels, grids))
        return _milliseconds(lambda: whole(encoder.encoding(parts, grids)))

    return measured_layer(time_step, tower.merge, tower.num_layers, tower.tile_side)


def _milliseconds(launch: Callable[[], object]) -> float:
    """Returns the device time of `launch`, or the time of its launches if that is longer, after a first call that
    compiles."""
    launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _max_over_ranks(values: Sequence[float]) -> list[float]:
    """Returns the longest of the ranks' values at each position; they are exchanged as integers in units of 1e-12."""
    return [longest / 1e12 for longest in parallel_state.all_reduce_max([round(value * 1e12) for value in values])]
