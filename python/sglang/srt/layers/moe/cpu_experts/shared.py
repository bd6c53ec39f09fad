"""CPUs that compute experts of a model's layers: their threads, and the memory in which steps ask them."""

from __future__ import annotations

import logging

import torch

from sglang.srt.errors import UserError
from sglang.srt.hardware.cpu_cores import ANY_CPU, ThreadPlaces, place_beside_others
from sglang.srt.layers.moe.cpu_experts import ops
from sglang.srt.layers.moe.cpu_experts.doorbell import Doorbell
from sglang.srt.layers.moe.cpu_experts.ops import DONE, FETCHED, MAX_PAIRS, MAX_TOKENS, WHOLE, Request
from sglang.srt.layers.moe.cpu_experts.pool import CpuExpertPool, PoolTotals
from sglang.srt.mem_cache.main_memory import device_address, map_memory, register
from sglang.srt.plan.cpu_experts import FLAG

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Seconds after which a process ends whose CPUs have not answered."""
FIRST_SHARE = WHOLE // 4
"""Share of the missing experts that the GPU copies until rates are known."""
ALIGNED = 64


class CpuExperts:
    """What the layers of a model share: threads, and the memory in which steps ask and CPUs answer."""

    def __init__(self) -> None:
        self.places: ThreadPlaces | None = None
        self.pool: CpuExpertPool | None = None
        self.bell: Doorbell | None = None
        self.hidden = 0

    def place(self, threads: int) -> ThreadPlaces:
        """Decides where so many threads run, once for all layers."""
        if self.places is None:
            self.places = place_beside_others(threads)
            if ANY_CPU in self.places.cpus:
                logger.warning(
                    "%s: the %d threads of a rank have no physical core each; more threads than cores are slower",
                    FLAG, threads,
                )  # fmt: skip
        return self.places

    @property
    def nodes(self) -> tuple[int, ...]:
        """Returns the NUMA nodes among which rows of experts are divided; none: they are not."""
        return () if self.places is None else self.places.nodes

    def start(self, threads: int, hidden: int, device: torch.device) -> CpuExpertPool:
        """Returns the pool, which the first layer starts, for rows of `hidden` columns. Raises UserError."""
        if self.pool is not None:
            if self.hidden != hidden:
                raise UserError(f"CPUs compute experts of layers with one hidden size, not {self.hidden} and {hidden}")
            return self.pool
        self.pool, self.hidden = CpuExpertPool(self.place(threads), MAX_TOKENS, MAX_PAIRS), hidden
        sizes = {"words": 4 * ops.WORDS, "ids": 4 * MAX_PAIRS, "weights": 4 * MAX_PAIRS}
        sizes |= {"x": 2 * MAX_TOKENS * hidden, "results": 4 * MAX_TOKENS * hidden}
        places, end = {}, 0
        for name, size in sizes.items():
            places[name], end = slice(end, end + size), end + -(-size // ALIGNED) * ALIGNED
        memory = map_memory(end)
        if device.type == "cuda" and (code := register(memory)):
            raise UserError(f"{end} bytes of main memory for requests to CPUs cannot be page-locked: CUDA error {code}")
        dtypes = {"x": torch.bfloat16, "weights": torch.float32, "results": torch.float32}
        parts = {name: memory[place].view(dtypes.get(name, torch.int32)) for name, place in places.items()}
        addresses = [device_address(parts[name]) for name in ("ids", "weights", "x", "results", "words")]
        self.request = Request(
            **parts,
            asked=torch.zeros(1, dtype=torch.int32, device=device),
            addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
        )
        self.request.words[FETCHED] = FIRST_SHARE
        return self.pool

    def connect(self, device: torch.device, bus_rate: float) -> None:
        """Begins to answer the GPU's requests, unless that has been done. `bus_rate`: bytes a second at which the GPU
        copies experts. Raises UserError."""
        if self.bell is not None:
            return
        assert self.pool is not None
        words = self.request.words.view(torch.int64)
        self.bell = Doorbell(words[:1], words[DONE // 2 : DONE // 2 + 1], device)
        self.pool.connect(self.request, DEADLINE_S, bus_rate)
        self.bell.probe(1)

    @property
    def gpu_share(self) -> float:
        """Returns the share of the missing experts that the GPU copies."""
        return int(self.request.words[FETCHED]) / WHOLE

    def totals(self) -> PoolTotals | None:
        """Returns what CPUs have computed; None where they compute nothing."""
        return None if self.pool is None else self.pool.totals()
