"""SGLang's own Triton attention on an RTX PRO 6000 Server: how it cuts its work there, and its fitted times.

Tiles, warps, shared memory and registers are those of release 0.5.15 as compiled for sm_120 with Triton 3.6.0 by the
recorder of `scripts/upstream`; 0.5.12 takes the same tiles. The times are fitted on release 0.5.14's
(benchmark/kernels/card/fit_attention.py, which prints this table).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sglang.tuning.attention_model import NUM_SMS, Keys, Pieces, Prompt, PromptTile, PromptTimes, StepTimes

SHARED_PER_SM, REGISTERS_PER_SM, WARPS_PER_SM = 102_400, 65_536, 48


@dataclass(frozen=True, slots=True)
class Compiled:
    """Bytes of shared memory, registers a thread, warps."""

    smem: int
    registers: int
    warps: int

    @property
    def occupancy(self) -> int:
        of_warp = -(-self.registers * 32 // 256) * 256
        return min(
            SHARED_PER_SM // (self.smem + 1024),
            REGISTERS_PER_SM // (of_warp * self.warps),
            WARPS_PER_SM // self.warps,
        )


DECODE: Mapping[str, Compiled] = {
    "64": Compiled(11264, 64, 4), "64/fp8": Compiled(5632, 64, 4),
    "128": Compiled(21504, 88, 4), "128/fp8": Compiled(10752, 96, 4),
    "192": Compiled(33792, 123, 4), "192/fp8": Compiled(16896, 96, 4),
    "256": Compiled(41984, 108, 4), "256/fp8": Compiled(20992, 128, 4),
    "256/alone": Compiled(4096, 128, 4), "256/alone/fp8": Compiled(4096, 128, 4),
    "512": Compiled(82944, 199, 4), "512/fp8": Compiled(41472, 164, 4),
    "512/alone": Compiled(4096, 251, 4), "512/alone/fp8": Compiled(8192, 166, 4),
    "576": Compiled(63488, 194, 4), "576/alone": Compiled(4096, 255, 4),
}  # fmt: skip
"""By head dim; "alone": query heads that share no kv head have another kernel; "fp8": the cache's type."""
PROMPT: Mapping[int, tuple[int, int, Compiled]] = {
    64: (64, 128, Compiled(24576, 255, 4)),
    128: (64, 128, Compiled(65536, 255, 8)),
    192: (64, 64, Compiled(49152, 255, 8)),
    256: (64, 64, Compiled(73728, 255, 8)),
    512: (32, 32, Compiled(67584, 242, 8)),
    576: (32, 32, Compiled(71680, 255, 8)),
}
"""Head dim -> BLOCK_M, BLOCK_N and what it takes; one stage."""
MOST_PIECES, MOST_LATENT_PIECES = 8, 256
SHORT = 32
"""Keys that a piece has at least."""


def decode_key(keys: Keys) -> str:
    alone = "/alone" if keys.group == 1 else ""
    return f"{keys.head_dim}{alone}{'/fp8' if keys.item == 1 else ''}"


def decode_pieces(keys: Keys) -> Pieces:
    """As release 0.5.14 splits requests of equal length. Raises KeyError for a head dim that is not on record."""
    compiled = DECODE[decode_key(keys)]
    most = MOST_LATENT_PIECES if keys.latent else MOST_PIECES
    tiles = keys.heads if keys.group == 1 else math.ceil(keys.heads / min(16, keys.group))
    grown = int(NUM_SMS * max(math.log2(keys.context / 64), 1.0))
    wanted = min(math.ceil(grown / (keys.batch * tiles)), most)
    chunk = math.ceil(math.ceil(keys.context / wanted) / SHORT) * SHORT
    count = math.ceil(keys.context / chunk)
    block_n = 64 if keys.group == 1 else 32
    programs = keys.batch * tiles
    return Pieces(
        programs * count, math.ceil(chunk / block_n), block_n, compiled.occupancy, programs * most, most, count - 1.0
    )


def prompt_key(prompt: Prompt, q_item: int = 2) -> str:
    parts = [str(prompt.head_dim), "fp8" if prompt.item == 1 else "", "q8" if q_item == 1 else ""]
    return "/".join(part for part in [*parts, "window" if prompt.window else ""] if part)


def prompt_tile(prompt: Prompt) -> PromptTile:
    m, n, compiled = PROMPT[prompt.head_dim]
    return PromptTile(m, n, compiled.occupancy)


DECODE_TIMES: Mapping[str, StepTimes] = {
    "64": StepTimes(0.769, 0.574, 0.0511, 4.79),
    "64/fp8": StepTimes(0.782, 0.571, 0.129, 6.8),
    "128": StepTimes(1.55, 1.22, 0.319, 4.41),
    "128/fp8": StepTimes(1.15, 0.806, 0.294, 6.64),
    "192": StepTimes(1.17, 0.929, 1.05, 10.6),
    "192/fp8": StepTimes(1.48, 1.05, 0.399, 12.2),
    "256": StepTimes(2.46, 0.103, 1.47, 3.88),
    "256/fp8": StepTimes(1.79, 0.136, 0.634, 6.28),
    "256/alone": StepTimes(9.59, 7.89, 0.149, 0.176),
    "256/alone/fp8": StepTimes(3.23, 0.319, 1.41, 6.73),
    "512": StepTimes(3.55, 1.72, 0.15, 5.83),
    "512/fp8": StepTimes(1.95, 1.9, 1.93, 7.6),
    "512/alone": StepTimes(7.24, 4.15, 0.15, 3.41),
    "512/alone/fp8": StepTimes(5.6, 2.98, 0.16, 7.12),
    "576": StepTimes(2.63, 0.0506, 0.15, 12.5),
    "576/alone": StepTimes(0.57, 0.859, 0.157, 21.8),
}
PROMPT_TIMES: Mapping[str, PromptTimes] = {
    "256/window": PromptTimes(28.7, 1.55, 4.1, 3.93, 0.0307),
    "256/fp8/window": PromptTimes(16.3, 1.81, 12.5, 4.23, 0.0324),
    "256/fp8/q8/window": PromptTimes(7.14, 1.58, 7.35, 1.35, 0.0858),
    "512": PromptTimes(3.92, 1.52, 3.73, 0.3, 0.893),
    "512/fp8": PromptTimes(6.97, 1.5, 6.18, 0.3, 1.7),
    "512/fp8/q8": PromptTimes(2.46, 1.55, 2.17, 0.3, 2.7),
    "128": PromptTimes(5.39, 1.51, 1.57, 0.3, 2.2),
    "128/fp8": PromptTimes(5.65, 1.51, 1.76, 0.3, 4.45),
    "128/fp8/q8": PromptTimes(3.78, 1.53, 1.23, 0.3, 3.22),
    "192": PromptTimes(3.9, 1.52, 2.19, 0.3, 9.25),
    "192/fp8": PromptTimes(3.93, 1.52, 2.15, 0.3, 11.4),
    "192/fp8/q8": PromptTimes(2.81, 1.55, 1.49, 0.3, 9.59),
    "192/window": PromptTimes(9.97, 1.5, 3.9, 2.59, 9.3),
    "192/fp8/window": PromptTimes(10.9, 1.5, 4.07, 3.51, 10.8),
    "192/fp8/q8/window": PromptTimes(2.1, 4.58, 0.804, 0.715, 9.7),
    "64": PromptTimes(2.82, 2.04, 2.88, 0.3, 2.71),
    "64/fp8": PromptTimes(3, 1.98, 2.08, 0.3, 5.02),
    "64/fp8/q8": PromptTimes(2.44, 1.73, 1.4, 0.3, 2.89),
    "64/window": PromptTimes(1.02, 5.93, 1.02, 3.82, 6.21),
    "64/fp8/window": PromptTimes(1.03, 5.4, 0.596, 3.53, 9.18),
    "64/fp8/q8/window": PromptTimes(0.951, 4.95, 0.364, 2.57, 7.07),
    "576": PromptTimes(4.22, 1.52, 4.2, 0.3, 4.5),
}
"""What equals the fit's start (`busy` 1.5 where one program fills an SM, `masked` 0.3 without a window) the data do
not tell."""
