"""SGLang's Triton attention on an RTX PRO 6000 Server: its tiles and work division there, and fitted times.

Tiles, warps, shared memory and registers are those of release 0.5.15 compiled for sm_120 with Triton 3.6.0 by the
recorder of `scripts/upstream`; 0.5.12 has the same tiles. The times are fitted to release 0.5.14's
(lab/kernels/card/fit_attention.py, which prints this table).
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
        """Returns the programs on an SM at a time."""
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
"""Compiled decode kernels by head dim; "alone": query heads that share no kv head have another kernel; "fp8": the
cache's type."""
PROMPT: Mapping[int, tuple[int, int, Compiled]] = {
    64: (64, 128, Compiled(24576, 255, 4)),
    128: (64, 128, Compiled(65536, 255, 8)),
    192: (64, 64, Compiled(49152, 255, 8)),
    256: (64, 64, Compiled(73728, 255, 8)),
    512: (32, 32, Compiled(67584, 242, 8)),
    576: (32, 32, Compiled(71680, 255, 8)),
}
"""Head dim -> BLOCK_M, BLOCK_N and what it takes; one stage."""
MAX_PIECES, MAX_LATENT_PIECES = 8, 256
SHORT = 32
"""Keys that a piece has at least."""


def decode_key(keys: Keys) -> str:
    """Returns the key of FlashInfer's decode times for these keys."""
    alone = "/alone" if keys.group == 1 else ""
    return f"{keys.head_dim}{alone}{'/fp8' if keys.item == 1 else ''}"


def decode_pieces(keys: Keys) -> Pieces:
    """Returns the pieces into which release 0.5.14 splits requests of equal length. Raises KeyError for a head dim that
    is not on record."""
    compiled = DECODE[decode_key(keys)]
    maximum = MAX_LATENT_PIECES if keys.latent else MAX_PIECES
    tiles = keys.heads if keys.group == 1 else math.ceil(keys.heads / min(16, keys.group))
    grown = int(NUM_SMS * max(math.log2(keys.context / 64), 1.0))
    wanted = min(math.ceil(grown / (keys.batch * tiles)), maximum)
    chunk = math.ceil(math.ceil(keys.context / wanted) / SHORT) * SHORT
    count = math.ceil(keys.context / chunk)
    block_n = 64 if keys.group == 1 else 32
    programs = keys.batch * tiles
    return Pieces(
        programs * count,
        math.ceil(chunk / block_n),
        block_n,
        compiled.occupancy,
        programs * maximum,
        maximum,
        count - 1.0,
    )


def prompt_key(prompt: Prompt, q_item: int = 2) -> str:
    """Returns the key of FlashInfer's prompt times. q_item: bytes of a query's element."""
    parts = [str(prompt.head_dim), "fp8" if prompt.item == 1 else "", "q8" if q_item == 1 else ""]
    return "/".join(part for part in [*parts, "window" if prompt.window else ""] if part)


def prompt_tile(prompt: Prompt) -> PromptTile:
    """Returns the tile of FlashInfer's prompt kernel for the head size."""
    m, n, compiled = PROMPT[prompt.head_dim]
    return PromptTile(m, n, compiled.occupancy)


DECODE_TIMES: Mapping[str, StepTimes] = {
    "256": StepTimes(2.47, 0.0518, 1.44, 3.84, 0.00801),
    "256/fp8": StepTimes(1.77, 0.12, 0.594, 5.58, 0.747),
    "256/alone": StepTimes(9.57, 6.7, 0.149, 0.162, 0.037),
    "256/alone/fp8": StepTimes(3.2, 0.308, 1.4, 6.73, 0.0373),
    "512": StepTimes(3.21, 2.08, 0.15, 2.36, 3.58),
    "512/fp8": StepTimes(2.06, 1.75, 1.78, 7, 0.641),
    "512/alone": StepTimes(7.26, 4.1, 0.15, 3.31, 0.0377),
    "512/alone/fp8": StepTimes(5.57, 3.01, 0.154, 3.56, 3.51),
    "128": StepTimes(1.54, 1.21, 0.244, 3.56, 0.838),
    "128/fp8": StepTimes(1.14, 0.818, 0.304, 5.79, 0.919),
    "192": StepTimes(1.27, 1.02, 1.01, 9.57, 0.948),
    "192/fp8": StepTimes(1.45, 1.18, 0.361, 8.92, 3.32),
    "64": StepTimes(0.772, 0.558, 0.0505, 2.03, 2.79),
    "64/fp8": StepTimes(0.793, 0.661, 0.179, 5.81, 1),
    "576": StepTimes(2.64, 0.0563, 0.15, 12.5, 0.0502),
    "576/alone": StepTimes(0.554, 0.833, 0.156, 21.5, 0.288),
}
PROMPT_TIMES: Mapping[str, PromptTimes] = {
    "256/window": PromptTimes(18.1, 28.7, 12, 3.36, 0.00453, 3.34),
    "256/fp8/window": PromptTimes(13.2, 15.2, 12.8, 4.07, 0.0378, 3.95),
    "256/fp8/q8/window": PromptTimes(6.37, 5.9, 5.59, 1.27, 1.85, 1.02),
    "512": PromptTimes(3.18, 3.29, 0.791, 0.3, 2.91, 2.9),
    "512/fp8": PromptTimes(6.25, 5.13, 2.73, 0.3, 3.46, 3.75),
    "512/fp8/q8": PromptTimes(2.25, 1.94, 0.668, 0.3, 3.34, 1.48),
    "128": PromptTimes(4.75, 4.14, 0.295, 0.3, 2.82, 1.75),
    "128/fp8": PromptTimes(5.02, 4.21, 0.251, 0.3, 4.91, 2.05),
    "128/fp8/q8": PromptTimes(3.27, 3.05, 0.469, 0.3, 3.89, 0.784),
    "192": PromptTimes(3.51, 2.91, 0.661, 0.3, 9.88, 2.27),
    "192/fp8": PromptTimes(3.52, 2.93, 0.484, 0.3, 12, 2.45),
    "192/fp8/q8": PromptTimes(2.6, 2.08, 0.565, 0.3, 9.86, 1.29),
    "192/window": PromptTimes(6.83, 9.14, 2.11, 2.55, 13.3, 2.03),
    "192/fp8/window": PromptTimes(7.18, 9.91, 2.06, 3.46, 15.1, 2.69),
    "192/fp8/q8/window": PromptTimes(2.93, 3.77, 0.363, 0.713, 10.9, 1.67),
    "64": PromptTimes(2.72, 1.93, 2.12, 0.3, 2.84, 1.05),
    "64/fp8": PromptTimes(2.87, 1.88, 0.734, 0.3, 5.31, 1.57),
    "64/fp8/q8": PromptTimes(2.42, 1.63, 0.885, 0.3, 2.76, 0.899),
    "64/window": PromptTimes(3.76, 4.95, 2.46, 3.79, 6.08, 0.464),
    "64/fp8/window": PromptTimes(3.48, 4.45, 1.86, 3.51, 8.91, 0.989),
    "64/fp8/q8/window": PromptTimes(3.58, 4.26, 1.54, 2.56, 6.8, 0.243),
    "576": PromptTimes(3.5, 3.52, 0.751, 0.3, 6.36, 3.98),
}
"""Fitted times. The data do not determine values that equal the fit's start: `busy` 1.5 where one program fills an SM,
`masked` 0.3 without a window."""
