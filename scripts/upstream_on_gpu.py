"""Runs a pristine and a produced SGLang tree on this machine's GPU and compares them. See docs/upstream.md.

    python scripts/upstream_on_gpu.py --pristine SITE --produced DIR --model DIR --out results.json

SITE is a folder with SGLang as released and its dependencies, DIR one with the produced `sglang`; the rest comes from
SITE. The produced side runs with SGLANG_FORCE_SM120_TILES=1, so that any GPU takes the tiles of SM12x.

- kernels: upstream's extend, decode and prefill attention on both sides, against each other and against fp32.
- server: both servers with the same random weights; log probabilities and tokens of the same greedy requests.

--model needs a config.json (of a dense Qwen3) and a tokenizer. Exits with 1 if anything fails; the JSON says
what, with tracebacks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from upstream.gpu import judge, serve
from upstream.gpu.cases import CASES, inputs, reference

SCRIPTS = Path(__file__).resolve().parent
KERNEL_LIMIT_S = 180
NAMES = ("pristine", "produced")
FORCED = {"SGLANG_FORCE_SM120_TILES": "1"}


class Side:
    """One of the two trees: what its processes have as PYTHONPATH and environment."""

    def __init__(self, name: str, tree: Path, site: Path) -> None:
        if not (tree / "sglang" / "srt").is_dir():
            raise SystemExit(f"error: --{name} {tree} has no sglang/srt; give the folder that holds `sglang`")
        self.name, self.tree = name, tree
        self.path = os.pathsep.join(dict.fromkeys((str(tree), str(site))))
        self.env = FORCED if name == "produced" else {}


def start_kernels(sides: list[Side], shards: int, folder: Path, logs: Path) -> list[subprocess.Popen[bytes]]:
    """Several processes a side, as most of the time is Triton's compiling."""
    processes = []
    for side in sides:
        for shard in range(shards):
            command = [sys.executable, "-W", "ignore", "-m", "upstream.gpu.kernels", "--side", side.name]
            environment = {**os.environ, **serve.ENVIRONMENT, **side.env}
            environment["PYTHONPATH"] = os.pathsep.join((side.path, str(SCRIPTS)))
            with (logs / f"kernels-{side.name}-{shard}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, "--out", str(folder), "--shard", f"{shard}/{shards}"],
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )
    return processes


def finish_kernels(processes: list[subprocess.Popen[bytes]], folder: Path) -> dict[str, Any]:
    """Waits, judges every case, and says what is wrong with the set."""
    end = time.monotonic() + KERNEL_LIMIT_S
    for process in processes:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for number, case in enumerate(CASES):
        try:
            pristine, produced = (_load(folder / f"{number}-{name}.pt") for name in NAMES)
            expected = reference(case, inputs(case), device).cpu()
            rows.append(judge.judge(case, pristine, produced, expected))
        except Exception:  # of this case; the others go on
            rows.append({"case": case.name, "op": case.op, "problems": [traceback.format_exc()]})
    return {"cases": rows, "problems": judge.overall(rows)}


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"error": "its process ended before this case; see its log"}
    return torch.load(path)  # type: ignore[no-any-return]


def finish_servers(servers: list[serve.Server], vocabulary: int) -> dict[str, Any]:
    """Asks each server, and compares: across the sides, and the pristine one with itself as a measure of noise."""
    bodies = serve.requests(vocabulary)
    answers, up = {}, {}
    for server in servers:
        up[server.name] = round(server.wait(), 1)
    for server in servers:
        answers[server.name] = serve.ask(server, bodies)
    pristine, produced = answers["pristine"], answers["produced"]
    compared = {
        "one after the other": judge.compare_answers(pristine["alone"], produced["alone"]),
        "all at once": judge.compare_answers(pristine["together"], produced["together"]),
    }
    noise = judge.compare_answers(pristine["alone"], pristine["together"])
    problems = [f"{how}: {problem}" for how, result in compared.items() for problem in result["problems"]]
    cached = [a["cached_tokens"] for a in produced["alone"]]
    if not any(cached):
        problems.append("no request found its prefix in the produced server's cache")
    summary = {"seconds_to_start": up, "compared": compared, "cached_tokens": cached}
    return {**summary, "pristine_with_itself": noise, "problems": problems, "answers": answers}


def table(results: dict[str, Any]) -> str:
    lines = []
    if kernels := results.get("kernels"):
        lines.append(
            f"{'error norm against fp32 / between the sides':<46} pristine  produced  between  tiles (M, N, warps)"
        )
        for row in kernels["cases"]:
            values = [row.get(key) for key in ("pristine_error", "produced_error", "between")]
            cells = "  ".join("-".rjust(8) if value is None else f"{value:8.1e}" for value in values)
            tiles = [" ".join(map(str, row.get(f"{side}_tile") or [])) for side in NAMES]
            lines.append(
                f"{row['case']:<46} {cells} {' -> '.join(tiles) if any(tiles) else 'as before'}"
                f" {'FAILED' if row['problems'] else 'ok'} {row.get('note', '')}".rstrip()
            )
    if server := results.get("server"):
        comparisons = {**server.get("compared", {}), "(pristine with itself)": server.get("pristine_with_itself")}
        for how, result in comparisons.items():
            if result:
                lines.append(
                    f"server, {how}: {result['compared']} log probabilities differ by"
                    f" {result['max_logprob']:.3f} at most, {result['rms_logprob']:.4f} rms;"
                    f" {result['equal_tokens']} tokens equal, {result['requests_parted']} requests part at a near tie"
                )
        lines.append(
            f"server: started after {server.get('seconds_to_start')} s, tokens cached {server.get('cached_tokens')}"
        )
    problems = _problems(results)
    lines += [f"FAILED {_brief(problem)}" for problem in problems] or ["all is well"]
    return "\n".join(lines)


def _brief(problem: str) -> str:
    """The first line and the last ones of a traceback or a log; the JSON has all of it."""
    lines = [line for line in problem.strip().splitlines() if line.strip()]
    return "\n  ".join([lines[0], *lines[1:][-3:]])[:600]


def _problems(results: dict[str, Any]) -> list[str]:
    found = []
    for part, result in results.items():
        if isinstance(result, dict):
            found += [f"{part}: {problem}" for problem in result.get("problems", ())]
            found += [f"{row['case']}: {p}" for row in result.get("cases", ()) for p in row["problems"]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pristine", type=Path, required=True)
    parser.add_argument("--produced", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="a folder for the processes' logs; default: beside --out")
    parser.add_argument("--parts", default="kernels,server")
    parser.add_argument("--shards", type=int, default=4, help="processes of each side that run kernels")
    parser.add_argument("--port", type=int, default=31000, help="of the pristine server; the other has 400 more")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - {"kernels", "server"}:
        parser.error(f"--parts {', '.join(sorted(unknown))}: expected kernels, server or both")
    site = options.pristine.resolve()
    sides = [Side("pristine", site, site), Side("produced", options.produced.resolve(), site)]
    logs = options.logs or options.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    with tempfile.TemporaryDirectory(prefix="upstream-gpu-") as temporary:
        _run(sides, parts, options, Path(temporary), logs, results)
    results["seconds"] = round(time.monotonic() - started, 1)
    options.out.write_text(json.dumps(results, indent=1))
    print(table(results))
    return 1 if _problems(results) else 0


def _run(
    sides: list[Side], parts: list[str], options: argparse.Namespace, folder: Path, logs: Path, results: dict[str, Any]
) -> None:
    """Everything starts at once: the servers while kernels compile."""
    servers = [
        serve.Server(s.name, s.tree, s.path, s.env, options.port + 400 * i, logs / f"server-{s.name}.log")
        for i, s in enumerate(sides)
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        if "kernels" in parts:
            processes = start_kernels(sides, options.shards, folder, logs)
        if "server" in parts:
            results["server"] = _guarded(lambda: _start_servers(servers, options.model, folder))
        if "kernels" in parts:
            results["kernels"] = _guarded(lambda: finish_kernels(processes, folder))
            print(f"kernels: {len(_problems({'k': results['kernels']}))} problems", flush=True)
        if "server" in parts and not results["server"]["problems"]:
            vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
            results["server"] = _guarded(lambda: finish_servers(servers, vocabulary))
    finally:
        for server in servers:
            server.stop()
        for process in processes:
            process.kill()
            process.wait()


def _start_servers(servers: list[serve.Server], model: Path, folder: Path) -> dict[str, Any]:
    checkpoint = folder / "model"
    serve.write_checkpoint(model, checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    for server in servers:
        server.start(checkpoint)
    return {"problems": []}


def _guarded(part: Any) -> dict[str, Any]:
    try:
        return dict(part())
    except Exception:  # one part's failure is a result; the other part goes on
        return {"problems": [traceback.format_exc()]}


if __name__ == "__main__":
    sys.exit(main())
