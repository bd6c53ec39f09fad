"""How much of images is computed between two tokens of requests that decode."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sglang.srt.model_executor.media_pace import (
    MAX_CUTS,
    MIN_TOKENS,
    SHARE,
    LayerTimes,
    MediaPace,
    measured_layer,
)
from sglang.srt.model_executor.media_timing import measured_pace
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.towers.base.patch_places import Grid, num_patches
from sglang.srt.towers.base.pieces import Cuts, PatchChunk, pairs_of, parts_of, pieces_of
from sglang.srt.towers.base.spec import Tower
from sglang.srt.towers.qwen2_5_vl.spec import Qwen2_5VLTower
from sglang.srt.towers.qwen3_vl.spec import Qwen3VLTower

IMAGE: list[Grid] = [(1, 64, 64)]
LARGE: list[Grid] = [(1, 128, 128)]
VIDEO: list[Grid] = [(32, 28, 28)]
LAYER = LayerTimes.fitted((4, 1024, 0.5), (1, 4096, 1.1), 0.2)
PACE = MediaPace(LAYER, {1: 5.0, 64: 10.0}, {64: 9.0, 128: 9.5, 256: 10.0, 512: 16.0, 1024: 30.0})
SIZES = {"num_layers": 27, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "out_size": 64, "merge": 2}
TOWER = Qwen3VLTower(**SIZES, patch_shape=(3, 2, 16, 16), side=8, theta=1e4)  # type: ignore[arg-type]
WINDOWS = Qwen2_5VLTower(**SIZES, patch_shape=(3, 2, 14, 14), window=4, full_layers=(7, 15, 23))  # type: ignore[arg-type]


def of_layer(layer: LayerTimes, clips: list[int]) -> float:
    """Milliseconds of a whole layer over clips of so many patches."""
    halves = 2 * layer.time_chunk(PatchChunk(0.5, sum(clips), 0.0))
    return halves + layer.time_chunk(PatchChunk(0.0, sum(clips), sum(size**2 for size in clips)))


def test_times_of_layers_are_those_that_were_measured() -> None:
    assert of_layer(LAYER, [1024] * 4) == pytest.approx(0.5)
    assert of_layer(LAYER, [4096]) == pytest.approx(1.1)
    assert of_layer(LAYER, [64]) == pytest.approx(0.2, rel=0.01), "launches"
    assert of_layer(LAYER, [16384]) > 4 * 1.1, "patches see more of one another"


def test_a_measured_encoder() -> None:
    seen: list[list[Grid]] = []

    def milliseconds(grids: list[Grid]) -> float:
        seen.append(grids)
        return 10 * (0.1 + sum(num_patches([grid]) * (1e-4 + 1e-8 * num_patches([grid])) for grid in grids))

    layer = measured_layer(milliseconds, merge=3, num_layers=10)  # type: ignore[arg-type]
    assert all(side % 3 == 0 for grids in seen for grid in grids for side in grid[1:])
    assert of_layer(layer, [63**2]) == pytest.approx(0.1 + 63**2 * (1e-4 + 1e-8 * 63**2))


def times(pace: MediaPace, tower: Tower, grids: list[Grid], requests: int) -> list[float]:
    """Milliseconds of each slice."""
    assert pace.layer is not None
    slices = pace.slices(tower, grids, requests)
    pieces = [piece for part in parts_of(tower, grids) for piece in pieces_of(tower, part, slices.cuts)]
    assert sum(slices.pieces) == len(pieces) and min(slices.pieces) > 0
    ends = np.cumsum(slices.pieces)[:-1]
    return [sum(map(pace.layer.time_chunk, run)) for run in np.split(np.array(pieces, dtype=object), ends)]


@pytest.mark.parametrize("tower", [TOWER, WINDOWS])
@pytest.mark.parametrize("grids", [IMAGE, LARGE, VIDEO, [*IMAGE, *LARGE]])
@pytest.mark.parametrize(("requests", "step_ms"), [(1, 5.0), (2, 10.0), (64, 10.0), (90, 10.0)])
def test_a_slice_is_a_share_of_the_step(requests: int, step_ms: float, grids: list[Grid], tower: Tower) -> None:
    """Also of an image whose layer takes 12 ms, as far as products of all patches allow: these are not cut."""
    slices = times(PACE, tower, grids, requests)
    products = max(LAYER.time_chunk(PatchChunk(0.5, num_patches(part), 0.0)) for part in parts_of(tower, grids))
    assert max(slices) <= max(SHARE * step_ms, products) + 1e-9
    assert sum(slices) / len(slices) > SHARE * step_ms / 2
    assert PACE.slices(tower, grids, requests).cuts.queries <= MAX_CUTS


def test_only_layers_that_are_too_long_are_cut() -> None:
    assert PACE.slices(TOWER, IMAGE, 64).cuts == Cuts()
    assert PACE.slices(TOWER, LARGE, 64).cuts.queries > 4 and PACE.slices(TOWER, LARGE, 64).cuts.rows == 1
    assert MediaPace(LAYER, {64: 1.0}).slices(TOWER, LARGE, 64).cuts.rows == 2, "0.6 ms of products before attention"
    assert PACE.slices(TOWER, VIDEO, 64).cuts == Cuts()


def test_a_layer_without_windows_among_others_is_longer_than_the_mean() -> None:
    assert pairs_of(WINDOWS, LARGE) == 9 * pairs_of(TOWER, LARGE)
    whole, of_windows = (sum(p.pairs for p in pieces_of(tower, LARGE, Cuts(3))) for tower in (TOWER, WINDOWS))
    assert whole == pytest.approx(of_windows)


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        (1, 229),  # up to 1.1 times the shortest, though 1.3 times the decode step is less: launches take that long
        (64, 384 - 64),  # 13 ms, half way from 10 to 16
        (900, MIN_TOKENS),
    ],
)
def test_a_prompt_adds_a_share_of_the_step(requests: int, tokens: int) -> None:
    assert PACE.prompt_tokens(requests) == pytest.approx(tokens, abs=2)


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        (1, 128 - 1),  # 6.5 ms: 192 take longer
        (64, 256 - 64),
        (70, 256 - 70),  # the graph is filled
        (190, 256 - 190),
        (200, 320 - 200),  # 256 would leave too few: the next larger one, however long it takes
        (300, MIN_TOKENS),
    ],
)
def test_a_prompt_in_a_graph_fills_it(requests: int, tokens: int) -> None:
    times = {64: 5.5, 128: 6.0, 192: 8.0, 256: 13.0, 320: 14.0}
    assert MediaPace(LAYER, {1: 5.0, 64: 10.0}, times, in_graphs=True).prompt_tokens(requests) == tokens


def test_what_is_not_measured() -> None:
    assert MediaPace().prompt_tokens(64) is None
    slices = MediaPace().slices(TOWER, IMAGE, 64)
    assert len(slices.pieces) == 4 and slices.cuts == Cuts(), "a constant number of patches times layers"
    short = MediaPace(LAYER, {64: 100.0}, {64: 9.0, 512: 16.0})
    assert short.prompt_tokens(64) == 512 - 64, "no longer than what was measured"
    assert len(short.slices(TOWER, [(1, 2, 2)], 64).pieces) == 1


def test_times_of_graphs_come_before_those_of_launches() -> None:
    """A GPU measures the latter."""
    runner = SimpleNamespace(
        media=SimpleNamespace(encoder=None),
        longest_prompt=512,
        step_times=lambda: {(1, 1): 5.0, (1, 3): 6.0, (8, 1): 7.0},
        media_prompt_times=lambda: {128: 8.0, 64: 6.0},
    )
    pace = measured_pace(runner)
    assert pace == MediaPace(None, {1: 5.0, 8: 7.0}, {64: 6.0, 128: 8.0}, in_graphs=True)
    assert measured_pace(SimpleNamespace(media=runner.media, step_times=dict)) == MediaPace()


@pytest.mark.parametrize(("chunk", "longest"), [(64, 64), (512, 99), (-1, 99)])
def test_the_longest_prompt_leaves_room_for_a_token(chunk: int, longest: int) -> None:
    plan = SimpleNamespace(context_len=100, chunked_prefill_size=chunk, max_prefill_tokens=4096)
    assert ModelRunner.longest_prompt.fget(SimpleNamespace(plan=plan)) == longest  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_graphs", [True, False])
@pytest.mark.parametrize(("both_ways", "stages"), [(None, 1), (True, 1), (False, 2), (False, 1)])
def test_prompts_are_timed_where_graphs_have_images(in_graphs: bool, both_ways: bool | None, stages: int) -> None:
    media = None if both_ways is None else SimpleNamespace(both_ways=both_ways)
    plan = SimpleNamespace(description=SimpleNamespace(media=media), ranks=SimpleNamespace(pp_size=stages))
    graphs = SimpleNamespace(prompt_times=lambda: {64: 6.0}) if in_graphs else None
    times = ModelRunner.media_prompt_times(SimpleNamespace(plan=plan, graphs=graphs))  # type: ignore[arg-type]
    assert times == ({64: 6.0} if in_graphs and both_ways is False and stages == 1 else {})
