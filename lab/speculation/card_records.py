"""Predicted steps with drafts on SM120 beside records that others published, as `explain --time` predicts them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draft_shapes import DFLASH_27B, Case, deepseek_v4_flash, qwen3_6_27b_nvfp4

from sglang import explain
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.server_args import ServerArgs
from sglang.tuning.draft_steps import DraftedStep, time_drafted
from sglang.tuning.step import verify_step

CARD, CONTEXT = "rtx-pro-6000-server", 2048


COLUMNS = (
    *("cards", "requests", "plain ms", "verify ms", "draft ms"),
    *("record, tokens/s", "length that gives it", "predicted", "deviation"),
)


@dataclass(frozen=True, slots=True)
class Record:
    """`speeds`: published tokens a second by number of requests. The accept lengths are not published with them: that
    of the case is an assumption, and `assumed` says from where."""

    case: Case
    cards: int
    speeds: dict[int, float]
    assumed: str


_V4 = Case(
    "DeepSeek-V4-Flash-0731, its DSpark, five draft tokens", lambda _: deepseek_v4_flash(False, True, whole=True),
    ("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5"), 2.74,
)  # fmt: skip
_QWEN = Case(
    "Qwen3.8-27B NVFP4 (shape of Qwen3.6-27B), DFlash, seven draft tokens", lambda _: qwen3_6_27b_nvfp4(),
    ("--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "8"), 5.0, DFLASH_27B,
)  # fmt: skip
RECORDS = (
    Record(_V4, 2, {1: 188, 32: 1317}, "another server's for this draft on two DGX Sparks"),
    Record(_QWEN, 1, {1: 261}, "of at most 8"),
)


def drafted_steps(record: Record) -> dict[int, DraftedStep]:
    """Returns the predicted steps by number of requests."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*record.case.write(Path(folder), False), "--load-format", "dummy", "--skip-tokenizer-init"]
        args = ServerArgs.from_cli([*flags, "--tp-size", str(record.cards)])
        arch = arch_by_name(CARD)
        explained = explain.explain(args, arch, frozenset({"triton"}), advises=False)
    assert explained.draft is not None
    draft = explained.draft.description
    return {
        size: time_drafted(
            explained.model, draft, explained.parallel, verify_step(size, explained.width, CONTEXT), arch
        )
        for size in record.speeds
    }


def lines() -> Iterator[str]:
    """Yields a table of all records."""
    yield f"Predicted for {CARD} (nothing of this server has run there), requests of {CONTEXT:,} tokens, and"
    yield "records that others published for cards of this kind:"
    yield " | ".join(COLUMNS)
    for record in RECORDS:
        length = record.case.accept_length
        yield f"{record.case.what}; predicted at an accept length of {length:g}, {record.assumed}"
        for size, step in drafted_steps(record).items():
            speed, published = step.tokens_per_second(length), record.speeds[size]
            needed = published / step.tokens_per_second(1.0)
            ms = [1e3 * part.seconds for part in (step.plain, step.verify, step.draft)]
            yield (
                f"{record.cards:5} | {size:8} | {ms[0]:8.1f} | {ms[1]:9.1f} | {ms[2]:8.1f} | {published:16,.0f} |"
                f" {needed:20.2f} | {speed:9,.0f} | {speed / published - 1:+9.0%}"
            )
