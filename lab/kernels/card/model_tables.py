"""Prints, as markdown, what steps of the models that people run on the card are predicted to take there.

    python lab/kernels/card/model_tables.py --configs test/srt/kernels/configs [--context 2048]

For each model and layout a table of its ops with ours / best measured / floor in microseconds, the steps' times, where
most time is lost to the best measured kernels, and how published end-to-end figures compare. No GPU, no weights.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang.srt.configs.hf_config import read_config
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.plan.kv_spec import kv_cache_dtype
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription, describe_model
from sglang.srt.plan.ranks import RankLayout
from sglang.tuning.ops import CompressedAttention, Op, SelectedAttention
from sglang.tuning.predicted_times import beyond_cache
from sglang.tuning.sglang_times import time_by_sglang
from sglang.tuning.step import Step, decode_step, prefill_step
from sglang.tuning.steps import TimedOp, time_step, total

CARD, H200 = arch_by_name("rtx-pro-6000-server"), arch_by_name("h200")
LAYOUTS: tuple[tuple[str, str, int], ...] = (
    ("glm47", "GLM-4.7-FP8", 8),
    ("glm47", "GLM-4.7-FP8", 4),
    ("kimi_k25", "Kimi-K2.5 (INT4)", 8),
    ("kimi_k2_thinking", "Kimi-K2-Thinking-NVFP4", 8),
    ("deepseek_v32", "DeepSeek-V3.2", 8),
    ("deepseek_v4", "DeepSeek-V4-Flash", 4),
    ("deepseek_v4", "DeepSeek-V4-Flash", 8),
    ("gpt_oss", "GPT-OSS-120B", 1),
    ("gpt_oss", "GPT-OSS-120B", 2),
    ("qwen35", "Qwen3.5-35B-A3B", 1),
    ("qwen35", "Qwen3.5-35B-A3B", 2),
    ("qwen3", "Qwen3-8B", 1),
    ("qwen3_moe", "Qwen3-30B-A3B", 1),
    ("glm5", "GLM-5", 8),
    ("minimax_m2", "MiniMax-M2", 4),
    ("Qwen3.5-397B-A17B-NVFP4", "Qwen3.5-397B-A17B-NVFP4", 4),
)
"""Config, name, cards."""


@dataclass(frozen=True, slots=True)
class Published:
    """Someone's figure: milliseconds a step of `batch` requests, or output tokens a second of all of them."""

    config: str
    cards: int
    batch: int
    context: int
    tokens_per_second: float
    what: str
    arch: ArchTraits = CARD
    new: int = 1


def _glm(batch: int, speed: float) -> Published:
    return Published("glm47", 8, batch, 256, speed, "logs of 8 cards, short requests; prompts included")


PUBLISHED = (
    *(_glm(b, s) for b, s in ((1, 18), (8, 140), (32, 536), (64, 1028), (128, 2120), (256, 3170), (512, 4500))),
    Published("gpt_oss", 1, 1, 1024, 151, "Triton experts"),
    Published("gpt_oss", 1, 1, 1024, 201, "weight-only experts"),
    Published("deepseek_v4", 8, 1, 1024, 11.4, "first fallbacks"),
    Published("kimi_k25", 8, 1, 1024, 101, "best published, drafts likely"),
    Published("Qwen3.5-397B-A17B-NVFP4", 4, 1, 1024, 86, "NVFP4 experts by FlashInfer"),
    Published("MiniMax-M2.5-NVFP4", 2, 1, 1024, 87, "85 to 89; NVFP4 experts by FlashInfer"),
    Published("qwen3", 1, 1, 1024, 1 / 4.52e-3, "this server, measured", H200),
    Published("qwen3", 1, 16, 1024, 16 / 5.65e-3, "this server, measured", H200),
    Published("qwen3", 1, 64, 1024, 64 / 7.93e-3, "this server, measured", H200),
    Published("qwen3", 1, 1, 1024, 46209, "this server, measured: prompt", H200, 1024),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, required=True, help="directory of NAME.json")
    parser.add_argument("--only", choices=("published",), help="this table alone")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--flashinfer", action="store_true", help="which computes long prompts where it can")
    args = parser.parse_args(argv)
    if args.only:
        print("\n".join(published(args.configs)))
        return 0
    steps = (*(decode_step(batch, args.context) for batch in (1, 16, 64, 256)), prefill_step(8192))
    timed = []
    for config, name, cards in LAYOUTS:
        model, parallel = described(args.configs, config, cards)
        parallel = replace(parallel, library_prompts=args.flashinfer)
        timed.append((name, cards, {step: time_step(model, parallel, step, CARD) for step in steps}))
    print("\n".join([*summary(timed), "", *losses(timed), "", *published(args.configs), "", *details(timed)]))
    return 0


def described(configs: Path, config: str, cards: int) -> tuple[ModelDescription, ParallelConfig]:
    """As `explain` reads them: the cache's type from the checkpoint. `config`: NAME of NAME.json, or a directory of
    those beside."""
    whole = configs.parent / "published" / config
    with tempfile.TemporaryDirectory() as directory:
        if whole.is_dir():
            shutil.copytree(whole, directory, dirs_exist_ok=True)
        else:
            shutil.copy(configs / f"{config}.json", Path(directory) / "config.json")
        modelopt = configs / f"{config}.hf_quant_config.json"
        if modelopt.exists():
            shutil.copy(modelopt, Path(directory) / "hf_quant_config.json")
        values = read_config(Path(directory))
        quantization = quantization_of(values, Path(directory), None, "default")
    model = describe_model(values, quantization, source=config)
    return model, ParallelConfig(model.dtype, kv_cache_dtype("auto", model.dtype, quantization), 1, RankLayout(cards))


Timed = Sequence[tuple[str, int, dict[Step, list[TimedOp]]]]


def summary(timed: Timed) -> Iterator[str]:
    steps = list(timed[0][2])
    yield "| model | cards | " + " | ".join(map(str, steps)) + " |"
    yield "|---|---|" + "---|" * len(steps)
    for name, cards, by_step in timed:
        times = [total(rows) for rows in by_step.values()]
        cells = [
            f"{t.seconds * 1e3:.1f} ({t.low * 1e3:.1f}-{t.high * 1e3:.1f}) / {t.best * 1e3:.1f} / {t.floor * 1e3:.1f}"
            for t in times
        ]
        star = "*" if times[0].missing else ""
        yield f"| {name}{star} | {cards} | " + " | ".join(cells) + " |"


def losses(timed: Timed, least: float = 0.02) -> Iterator[str]:
    """Ops slower than the best measured by at least a fiftieth of their step, experts with the same even routing."""
    found = []
    for name, cards, by_step in timed:
        for step, rows in by_step.items():
            whole = total(rows).seconds
            found += [(row.lost / whole, name, cards, step, row) for row in rows if row.lost > least * whole]
    yield "| of the step | model | cards | step | op | ours, us, as the best was measured | best, us |"
    yield "|---|---|---|---|---|---|---|"
    for share, name, cards, step, row in sorted(found, key=lambda entry: -entry[0]):
        assert row.ours is not None and row.best is not None
        figures = f"{row.ours.comparable * 1e6:.0f} | {'' if row.best.exact else '~'}{row.best.served * 1e6:.0f}"
        yield f"| {share:.0%} | {name} | {cards} | {step} | {row.name} | {figures} |"


def published(configs: Path) -> Iterator[str]:
    """`SGLang's kernels`: with 0.5.14's as timed; `for the rest`: what then is left of the published step for an
    all-reduce, on several cards, and in all on one."""
    yield (
        "| model | cards | requests | published, tok/s | predicted, tok/s | range | predicted / published | "
        "with SGLang's kernels, tok/s | left for the rest | what |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    names = {config: name for config, name, _ in LAYOUTS}
    for entry in PUBLISHED:
        step = Step(entry.batch, entry.new, entry.context)
        rows = time_step(*described(configs, entry.config, entry.cards), step, entry.arch)
        time = total(rows)
        speeds = [step.tokens / seconds for seconds in (time.seconds, time.high, time.low)]
        theirs, left = _theirs(rows, step, entry)
        where = " (H200)" if entry.arch == H200 else ""
        yield (
            f"| {names.get(entry.config, entry.config)}{where} | {entry.cards} | {entry.batch} |"
            f" {entry.tokens_per_second:,.0f} |"
            f" {speeds[0]:,.0f} | {speeds[1]:,.0f} - {speeds[2]:,.0f} | {speeds[0] / entry.tokens_per_second:.2f} |"
            f" {theirs} | {left} | {entry.what} |"
        )


def _theirs(rows: Sequence[TimedOp], step: Step, entry: Published) -> tuple[str, str]:
    """Tokens a second with SGLang's kernels as they were timed on the card, weights read from memory; and microseconds
    of each all-reduce, or of the whole step on one card, that would make it the published figure."""
    if entry.arch != CARD:
        return "", ""
    seconds, reduces, reducing = 0.0, 0, 0.0
    for row in rows:
        if row.name == "all_reduce":
            reduces, reducing = row.count, row.seconds
            continue
        known = time_by_sglang(_timed_op(row, step, entry.cards), CARD)
        one = beyond_cache(known[0], row.op.num_bytes, CARD) if known else row.seconds / row.count
        seconds += row.count * one
    whole = step.tokens / entry.tokens_per_second
    left = (whole - seconds) / max(1, reduces)
    return (
        f"{step.tokens / (seconds + reducing):,.0f}",
        f"{left * 1e6:,.0f} us an all-reduce" if reduces else f"{left * 1e3:.1f} ms",
    )


V4_ENTRY = 512
"""Columns of DeepSeek-V4's entries."""


def _timed_op(row: TimedOp, step: Step, cards: int) -> Op:
    """DeepSeek-V4's attention as one op with its projections, as SGLang's was timed: of rate 4 in layers whose tokens
    attend to more than a window and one entry of every 128 tokens."""
    if not isinstance(row.op, SelectedAttention) or row.op.head_dim != V4_ENTRY:
        return row.op
    rate = 4 if row.op.entries > 128 + step.context // 128 else 128
    return CompressedAttention(step.batch, step.context, 64 // cards, rate, step.new, "fp8_block")


def details(timed: Timed) -> Iterator[str]:
    for name, cards, by_step in timed:
        yield f"### {name}, {cards} card{'s' if cards > 1 else ''}"
        yield ""
        yield "| op | times | " + " | ".join(map(str, by_step)) + " |"
        yield "|---|---|" + "---|" * len(by_step)
        names = dict.fromkeys((row.name, row.count) for rows in by_step.values() for row in _merged(rows))
        for op, count in names:
            cells = []
            for rows in by_step.values():
                same = [row for row in _merged(rows) if (row.name, row.count) == (op, count)]
                cells.append(_cell(same[0]) if same else "")
            yield f"| {op} | {count} | " + " | ".join(cells) + " |"
        yield ""


def _merged(rows: Sequence[TimedOp]) -> list[TimedOp]:
    """Without what takes less than a thousandth of the step."""
    whole = total(list(rows)).seconds
    return [row for row in rows if row.seconds > 0.001 * whole]


def _cell(row: TimedOp) -> str:
    ours = f"{row.ours.seconds * 1e6:.0f}" if row.ours else "none"
    found = f"{row.best.served * 1e6:.0f}" if row.best else "-"
    return f"{ours} / {found} / {row.floor * 1e6:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
