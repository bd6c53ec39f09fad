"""How much of images is computed between two tokens of requests that decode."""

from __future__ import annotations

import pytest

from sglang.srt.model_executor.media_pace import LEAST_TOKENS, SHARE, LayerTimes, MediaPace, measured_layer
from sglang.srt.models.vision.patch_places import Grid, num_patches

IMAGE: list[Grid] = [(1, 64, 64)]
LAYER = LayerTimes.fitted((4, 1024, 0.5), (1, 4096, 1.1), 0.2)
PACE = MediaPace(LAYER, {1: 5.0, 64: 10.0}, {64: 9.0, 128: 9.5, 256: 10.0, 512: 16.0, 1024: 30.0})


def test_times_of_layers_are_those_that_were_measured() -> None:
    assert LAYER.milliseconds([1024] * 4) == pytest.approx(0.5)
    assert LAYER.milliseconds([4096]) == pytest.approx(1.1)
    assert LAYER.milliseconds([64]) == 0.2, "launches"
    assert LAYER.milliseconds([16384]) > 4 * 1.1, "patches see more of one another"


def test_a_measured_encoder() -> None:
    seen: list[list[Grid]] = []

    def milliseconds(grids: list[Grid]) -> float:
        seen.append(grids)
        return 10 * (0.1 + sum(num_patches([grid]) * (1e-4 + 1e-8 * num_patches([grid])) for grid in grids))

    layer = measured_layer(milliseconds, merge=3, num_layers=10)  # type: ignore[arg-type]
    assert all(side % 3 == 0 for grids in seen for grid in grids for side in grid[1:])
    assert layer.milliseconds([63**2]) == pytest.approx(0.1 + 63**2 * (1e-4 + 1e-8 * 63**2))


@pytest.mark.parametrize(("requests", "step_ms"), [(1, 5.0), (2, 10.0), (64, 10.0), (90, 10.0)])
def test_a_slice_is_a_share_of_the_step(requests: int, step_ms: float) -> None:
    slices = PACE.slices(IMAGE, 1, 27, requests)
    each = 27 * 1.1 / slices
    assert each <= SHARE * step_ms < 27 * 1.1 / (slices - 1)


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        (1, 229),  # up to 1.1 times the shortest, though 1.3 times the decode step is less: launches take that long
        (64, 384 - 64),  # 13 ms, half way from 10 to 16
        (900, LEAST_TOKENS),
    ],
)
def test_a_prompt_adds_a_share_of_the_step(requests: int, tokens: int) -> None:
    assert PACE.prompt_tokens(requests) == pytest.approx(tokens, abs=2)


def test_what_is_not_measured() -> None:
    assert MediaPace().prompt_tokens(64) is None
    assert MediaPace().slices(IMAGE, 1, 27, 64) == 4, "a constant number of patches times layers"
    short = MediaPace(LAYER, {64: 100.0}, {64: 9.0, 512: 16.0})
    assert short.prompt_tokens(64) == 512 - 64, "no longer than what was measured"
    assert short.slices([(1, 2, 2)], 1, 27, 64) == 1
