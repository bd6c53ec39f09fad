"""Launches candidates on a GPU, in their processes."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch

from sglang.bench.device_calls import Launch, Launches, launches_of
from sglang.bench.device_time import CallTimer
from sglang.measuring.points import Candidate, Point
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.tile_configs import TileConfig
from sglang.srt.layers.triton_ops import pdl

ROUND_S = 0.03
"""Seconds of replays of one op in a round."""


@dataclass(frozen=True, slots=True)
class GpuLauncher:
    """Launches candidates on one GPU, as `processes.Launcher`."""

    arch: ArchTraits
    gpu: int

    def __call__(self, point: Point, candidate: Candidate) -> LaunchedOps:
        """Makes the buffers of the point's ops."""
        gc.collect()
        torch.cuda.set_device(self.gpu)
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        pdl.enable("pdl" in self.arch.features)
        launch = Launch(_alone(candidate.config), candidate.tile, candidate.kernel)
        launches = [launches_of(op, self.arch, "cuda", launch) for op in point.ops]
        assert all(launches), "an op that is not launched here"
        return LaunchedOps([each for each in launches if each is not None])


def _alone(config: TileConfig | None) -> TileConfig | None:
    """Returns a tile config without its fallbacks: what is timed must be what is named."""
    return None if config is None else replace(config, candidates=config.candidates[:1])


class LaunchedOps:
    """The ops of a point with one candidate."""

    def __init__(self, launches: list[Launches]) -> None:
        self._launches = launches
        self._timers: list[CallTimer] | None = None

    def problem(self) -> str:
        """Returns what is wrong with the first of their results that is not the reference's."""
        return next(filter(None, (each.problem() for each in self._launches)), "")

    def seconds(self) -> float:
        """Returns the seconds of all ops. The first call captures them."""
        if self._timers is None:
            self._timers = [CallTimer(each.calls) for each in self._launches]
        return sum(timer.seconds(ROUND_S) for timer in self._timers)
