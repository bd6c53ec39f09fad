#!/usr/bin/env python3
"""What each quantized form of the embedded model scores, beside the unquantized one, on the same held-out problems.

    python lab/evals/compare_schemes.py [--jobs 2] [--limit 50] [--schemes nvfp4,mxfp4] [--output report.json]
    SGLANG_FORCE_ARCH=sm_120 python lab/evals/compare_schemes.py --jobs 6      # on a GPU: SM120's choices

Exports every form with `python -m sglang.quantize`, serves it and scores it over OpenAI's API, --jobs servers at a
time. Exit status 1: a form lost more than --most points, a server ran it as another scheme or (on a GPU) by a
reference kernel, or a request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (str(HERE.parents[1] / "benchmark" / "evals"), str(HERE.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import bench_tiny  # noqa: E402
from served import ROOT, Server, ServerFailed, checkout_env, served  # noqa: E402

EMBEDDED = ROOT / "python" / "sglang" / "embedded" / "tiny"
PARALLEL = 32
SERVER_FLAGS = (
    *("--max-total-tokens", "131072", "--max-running-requests", str(PARALLEL)),
    *("--cuda-graph-max-bs", str(PARALLEL), "--log-level", "warning"),
)
"""Small, so that several servers fit on one GPU."""
CALIBRATION_PROMPTS = 200
CALIBRATION_SEED = 1


@dataclass(frozen=True, slots=True)
class Form:
    """`scheme` of sglang.quantize, None for the model as it is; `calibrated` ones store a scale of activations."""

    name: str
    scheme: str | None
    calibrated: bool = False
    flags: tuple[str, ...] = ()


BASE = Form("unquantized", None)
FORMS = (
    Form("fp8_block", "fp8_block"),
    Form("fp8_channel", "fp8_channel"),
    Form("fp8_tensor", "fp8_tensor"),
    Form("fp8_tensor_static", "fp8_tensor", calibrated=True, flags=("--static-activations",)),
    Form("mxfp8", "mxfp8"),
    Form("int8_channel", "int8_channel"),
    Form("int4_g32", "int4_g32"),
    Form("int4_g128", "int4_g128"),
    Form("mxfp4", "mxfp4"),
    Form("nvfp4", "nvfp4", calibrated=True),
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the server said it runs: kernel and remark of its quantized products and experts. `problems`: why this is
    not a run of the scheme's own kernels."""

    arch: str
    dtype: str
    quantization: str | None
    linear: str
    experts: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    form: Form
    kernels: Kernels
    report: bench_tiny.Report
    start_seconds: float

    @property
    def wrong(self) -> set[str]:
        return {failure["id"] for failure in self.report.failures}


@dataclass(frozen=True, slots=True)
class Run:
    """Shared by all forms."""

    model: Path
    work: Path
    problems: list[dict[str, Any]]
    device: str
    flags: tuple[str, ...]

    def measure(self, form: Form) -> Outcome:
        directory = self.model if form.scheme is None else self.export(form)
        with served(directory, self.work / f"{form.name}.log", self.flags) as server:
            report = bench_tiny.evaluate(server.url, self.problems, PARALLEL, margins=True)
            kernels = kernels_of(server, form)  # after the run: it also tells of launches that failed
            seconds = server.start_seconds
        right = f"{report.whole().right} of {report.whole().count} right"
        took = f"up after {seconds:.0f} s, scored in {report.seconds:.0f} s"
        print(f"{form.name}: {right}; {took}", file=sys.stderr, flush=True)
        return Outcome(form, kernels, report, seconds)

    def export(self, form: Form) -> Path:
        output = self.work / form.name
        command = [sys.executable, "-m", "sglang.quantize", "--model-path", str(self.model), "--output", str(output)]
        command += ["--scheme", str(form.scheme), *form.flags]
        if form.calibrated:
            command += ["--calibrate", str(self.prompts), "--calibration-device", self.device]
        done = subprocess.run(command, env=checkout_env(SGLANG_FORCE_ARCH=""), capture_output=True, text=True)
        if done.returncode:
            raise ServerFailed(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return output

    @property
    def prompts(self) -> Path:
        return self.work / "calibration.jsonl"


def write_calibration(path: Path) -> None:
    """Problems of the trained side of the split with their answers: what is scored must not be calibrated on."""
    from tiny_model.mixture import TASK_NAMES, draw
    from tiny_model.render import answer_text, prompt_text

    rng = random.Random(CALIBRATION_SEED)
    with path.open("w", encoding="utf-8") as file:
        for number in range(CALIBRATION_PROMPTS):
            problem = draw(TASK_NAMES[number % len(TASK_NAMES)], rng)
            text = prompt_text(problem, thinking=True) + answer_text(problem, thinking=True)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def kernels_of(server: Server, form: Form) -> Kernels:
    info = server.info()
    plan = info["kernels"]
    linear = "linear" if form.scheme is None else next((op for op in plan if op.startswith("linear/")), "linear")
    problems = [f"{step}" for state in info["internal_states"] for step in state["kernel_step_downs"]]
    if form.scheme is not None and form.scheme not in str(info["quantization"]):
        problems.append(f"served as {info['quantization']}")
    if info["device"] != "cpu":
        for op in (linear, "fused_moe"):
            if plan[op]["kernel"].startswith("torch_"):
                problems.append(f"{op} runs by reference: {'; '.join(plan[op]['not_chosen'])}")
    said = {op: " ".join(filter(None, (plan[op]["kernel"], plan[op]["remark"]))) for op in (linear, "fused_moe")}
    return Kernels(
        arch=info["arch"],
        dtype=info["dtype"],
        quantization=info["quantization"],
        linear=f"{linear}: {said[linear]}",
        experts=said["fused_moe"],
        problems=tuple(problems),
    )


def points_lost(base: Outcome, other: Outcome) -> float:
    return 100 * (base.report.whole().share - other.report.whole().share)


def margin_moved(base: Outcome, other: Outcome) -> float:
    """By how much the model is more or less sure of its tokens, relative."""
    before, after = base.report.whole().margin, other.report.whole().margin
    return after / before - 1 if before and after else 0.0


def worst_target(base: Outcome, other: Outcome) -> tuple[str, float]:
    """The target that lost most, and how many points."""
    lost = [
        (target.name, 100 * (before.share - after.share))
        for target in bench_tiny.TARGETS
        if (before := base.report.target(target)) and (after := other.report.target(target))
    ]
    return max(lost, key=lambda pair: pair[1], default=("", 0.0))


def table(outcomes: list[Outcome]) -> str:
    """Markdown. The first outcome is the base."""
    base = outcomes[0]
    lines = [
        "| form | score | points lost | newly wrong | newly right | margin | targets missed | most lost by a target |"
        " experts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        whole = one.report.whole()
        name, lost = worst_target(base, one)
        cells = [
            one.form.name,
            f"{whole.right} of {whole.count} ({100 * whole.share:.2f}%)",
            f"{points_lost(base, one):.2f}",
            str(len(one.wrong - base.wrong)),
            str(len(base.wrong - one.wrong)),
            f"{100 * margin_moved(base, one):+.2f}%",
            "; ".join(one.report.missed()) or "none",
            f"{name} {lost:.1f}" if lost > 0 else "none",
            one.kernels.experts,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_dict(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    base = outcomes[0]
    return {
        "force_arch": os.environ.get("SGLANG_FORCE_ARCH", ""),
        "seconds": round(seconds, 1),
        "forms": {
            one.form.name: {
                "points_lost": round(points_lost(base, one), 3),
                "newly_wrong": sorted(one.wrong - base.wrong),
                "newly_right": sorted(base.wrong - one.wrong),
                "start_seconds": round(one.start_seconds, 1),
                "kernels": asdict(one.kernels),
                **one.report.as_dict(),
            }
            for one in outcomes
        },
    }


def failings(outcomes: list[Outcome], most: float) -> list[str]:
    found = []
    for one in outcomes:
        lost, errors = points_lost(outcomes[0], one), one.report.whole().errors
        if lost > most:
            found.append(f"{one.form.name}: {lost:.2f} points lost, at most {most} are wanted")
        if errors:
            found.append(f"{one.form.name}: {errors} requests failed")
        found += [f"{one.form.name}: {problem}" for problem in one.kernels.problems]
    return found


def chosen(names: str) -> list[Form]:
    """The base, then these forms (all if none is named). Raises ValueError."""
    wanted = [name for name in names.split(",") if name]
    known = {form.name: form for form in FORMS}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--schemes: no such forms: {', '.join(unknown)}; there are {', '.join(known)}")
    return [BASE, *(known[name] for name in wanted or known)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="the unquantized model")
    parser.add_argument("--schemes", default="", help=f"of {', '.join(f.name for f in FORMS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="servers at a time")
    parser.add_argument("--limit", type=int, default=50, help="problems a task")
    parser.add_argument("--tasks", default="", help="separated by commas (default: all)")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", help="of activations, as the server's --dtype")
    parser.add_argument("--tp", type=int, default=1, help="GPUs a server")
    parser.add_argument("--most", type=float, default=2.0, help="points that a form may lose")
    parser.add_argument("--work-dir", type=Path, help="for checkpoints and logs (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="JSON report")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        forms = chosen(args.schemes)
        work = args.work_dir or Path(tempfile.mkdtemp(prefix="tiny-schemes-"))
        work.mkdir(parents=True, exist_ok=True)
        problems = bench_tiny.load(None, args.limit, [name for name in args.tasks.split(",") if name])
        flags = (*SERVER_FLAGS, "--device", args.device, "--dtype", args.dtype, "--tp", str(args.tp))
        run = Run(args.model, work, problems, args.device, flags)
        write_calibration(run.prompts)
        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = list(pool.map(run.measure, forms))
    except (ValueError, OSError, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - started
    kernels = outcomes[0].kernels
    print(f"{kernels.arch}, {kernels.dtype}, {len(problems)} problems, {seconds:.0f} s; checkpoints and logs: {work}")
    print(table(outcomes))
    if args.output:
        report = as_dict(outcomes, seconds)
        args.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    found = failings(outcomes, args.most)
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
