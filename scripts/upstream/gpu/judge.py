"""Judgement of results: errors of two sides against each other and against fp32, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from upstream.gpu.cases import Case


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of error norms relative to the norm of the reference."""

    whole: float
    """The whole tensor."""
    row: float
    """The worst (token, head)."""


BOUNDS = {
    # bf16: the probabilities and the result are each rounded to 8 bits, 1.1e-3 rms of their value
    "bf16": Bound(4e-3, 2e-2),
    # the probabilities are rounded to the cache's type, relative to a running maximum that depends on the tile
    "fp8_e4m3": Bound(4e-2, 2e-1),
    "fp8_e5m2": Bound(8e-2, 4e-1),
}
MHA_DECODE = Bound(1e-2, 5e-2)
"""Upstream's decode kernel for heads that share no keys rounds each product of q and k to bf16 before it adds them."""
NO_WORSE = 1.25
"""How much larger than the pristine tree's error against fp32 the produced tree's may be."""
NO_WORSE_FLOOR = 5e-4


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(of the whole, of the worst row [-1]); infinite where `actual` is not finite or has another shape."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf"), float("inf")
    difference, size = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
    whole = difference.norm() / size.norm().clamp_min(1e-30)
    return float(whole), float((difference / size.clamp_min(1e-30)).max())


def tile(launches: list[dict[str, Any]]) -> list[list[int]]:
    """[BLOCK_M, BLOCK_N, warps] of each launch that has rows."""
    return [[n["BLOCK_M"], n["BLOCK_N"], n["num_warps"]] for n in launches if "BLOCK_M" in n]


def judge(case: Case, pristine: dict[str, Any], produced: dict[str, Any], expected: torch.Tensor) -> dict[str, Any]:
    """A row of the results: errors, tiles, and `problems`, which is empty if all is well."""
    row: dict[str, Any] = {"case": case.name, "op": case.op, "problems": []}
    problems = row["problems"]
    if "error" in produced:
        problems.append(f"the produced tree failed:\n{produced['error']}")
        return row
    bound = MHA_DECODE if case.op == "decode" and case.heads == case.kv_heads else BOUNDS[case.kv]
    row["produced_tile"] = tile(produced["launches"])
    row["produced_error"], row["produced_row_error"] = relative_error(produced["out"], expected)
    _within(problems, "produced against fp32", row["produced_error"], row["produced_row_error"], bound)
    planned = produced["planned"]
    if planned and [t[: len(planned)] for t in row["produced_tile"]] != [planned]:
        problems.append(f"launched {row['produced_tile']}, and the table of SM120 tiles has {planned}")
    if "error" in pristine:
        row["note"] = "the pristine tree fails: " + pristine["error"].strip().splitlines()[-1]
        return row
    row["pristine_tile"] = tile(pristine["launches"])
    row["pristine_error"], row["pristine_row_error"] = relative_error(pristine["out"], expected)
    row["between"], row["between_row"] = relative_error(produced["out"], pristine["out"])
    row["tiles_differ"] = row["pristine_tile"] != row["produced_tile"]
    _within(problems, "between the sides", row["between"], row["between_row"], bound)
    limit = NO_WORSE * row["pristine_error"] + NO_WORSE_FLOOR
    if not row["produced_error"] <= limit:
        problems.append(
            f"error {row['produced_error']:.2e} against fp32; the pristine tree has {row['pristine_error']:.2e}"
        )
    if case.op == "decode" and row["between"] != 0.0:
        problems.append("decode kernels are not changed, and their results differ")
    return row


def _within(problems: list[str], what: str, whole: float, row: float, bound: Bound) -> None:
    if not whole <= bound.whole:
        problems.append(f"{what}: error {whole:.2e}, bound {bound.whole:.0e}")
    if not row <= bound.row:
        problems.append(f"{what}: error of the worst row {row:.2e}, bound {bound.row:.0e}")


def overall(rows: list[dict[str, Any]]) -> list[str]:
    """Problems of the whole set: that nothing differed proves that nothing was tried."""
    if not any(row.get("tiles_differ") for row in rows):
        return ["no case ran with another tile than in the pristine tree; is SGLANG_FORCE_SM120_TILES=1 in effect?"]
    return []


# Answers of a server: {"output_ids", "output": [logprob], "input": [logprob], "top": [{token: logprob}]} a request.

MAX_LOGPROB, RMS_LOGPROB = 0.2, 0.05
"""With the weights of `serve.write_checkpoint` (Qwen3-0.6B, 300 tokens), two ways to compute attention in bf16 differ
by 0.07 at most and 0.022 rms; a mask that loses one key in 64 makes 0.38 and 0.10 of it."""


def compare_answers(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of log probabilities where both saw the same tokens, and what is wrong with the tokens.

    Greedy decoding may part where two tokens are as good as equal; `problems` has it if they are not.
    """
    differences: list[float] = []
    problems: list[str] = []
    equal = parted = 0
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if len(a["input"]) != len(b["input"]) or len(a["output_ids"]) != len(b["output_ids"]):
            problems.append(f"request {number}: {len(a['output_ids'])} and {len(b['output_ids'])} tokens")
            continue
        differences += [abs(x - y) for x, y in zip(a["input"], b["input"], strict=True)]
        same = _common(a["output_ids"], b["output_ids"])
        differences += [abs(x - y) for x, y in zip(a["output"][:same], b["output"][:same], strict=True)]
        equal += same
        if same < len(a["output_ids"]):
            parted += 1
            gap = a["top"][same].get(a["output_ids"][same], 0.0) - a["top"][same].get(b["output_ids"][same], -1e9)
            if not gap <= MAX_LOGPROB:
                problems.append(f"request {number}: token {same} differs, and the choice was not close ({gap:.3f})")
    rms = (sum(d * d for d in differences) / max(1, len(differences))) ** 0.5
    largest = max(differences, default=float("inf"))
    if not (largest <= MAX_LOGPROB and rms <= RMS_LOGPROB):
        problems.append(f"log probabilities differ by {largest:.3f} at most, {rms:.4f} rms")
    summary = {"compared": len(differences), "max_logprob": largest, "rms_logprob": rms}
    return {**summary, "equal_tokens": equal, "requests_parted": parted, "problems": problems}


def _common(first: list[int], second: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y), len(first))
