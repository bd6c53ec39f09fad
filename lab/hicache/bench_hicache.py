"""Prefixes in main memory on one GPU: returning sessions, what others notice, a load beside that of a server without
them, rates of copies, and equal answers.

    python lab/hicache/bench_hicache.py --out results.json [--parts servers,rates] [--device cpu --tiny]
        [--measure load,sessions,others] [--peer-site DIR | --peer-python PATH | --peer-command COMMAND]

`servers` starts this server with prefixes in main memory (all else by default), this one without, and upstream with its
HiCache, side by side on the GPU, where two are idle while one is measured. Upstream comes from --peer-site (see
`benchmark/peers/compare.py`) in this interpreter, from --peer-python, or from a command behind which flags can be put;
one that does not serve in time costs its own rows only. Weights of Qwen3-4B's shapes are random: its keys and values
are those of Qwen3-8B, and three servers fit 80 GB. `rates`: copies beside one pinned copy. `equality`, which is not in
the default, compares answers of the embedded model. Everything of the default takes about four minutes.
Prints progress and tables; --out gets everything, part by part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load import load
from servers import Server
from sessions import others, sessions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "benchmark" / "peers"))
import compare  # noqa: E402

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TINY = QWEN3_4B | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 16384, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WITH, WITHOUT, PEER = "with main memory", "without", "peer"
PEER_OPTIONS = {
    "sampling_backend": "pytorch", "grammar_backend": "none", "page_size": 64, "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first", "hicache_write_policy": "write_through", "mem_fraction_static": 0.88,
    "disable_cuda_graph": True, "skip_server_warmup": True,
}  # fmt: skip
"""Of upstream. Its first tokens alone are measured, which graphs of decoding do not change; without them it starts
sooner."""
START_LIMIT_S = 150.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="servers,rates")
    parser.add_argument("--measure", default="load,sessions,others", help="What of `servers`.")
    parser.add_argument("--peer-site", help="Folder with upstream and its dependencies.")
    parser.add_argument("--peer-python", help="Interpreter that has upstream.")
    parser.add_argument("--peer-command", help="As `sglang serve`: starts a server when flags are put behind it.")
    parser.add_argument("--peer-attention", default="flashinfer")
    parser.add_argument("--peer-limit", type=float, default=START_LIMIT_S, help="Seconds for the peer's start.")
    parser.add_argument("--port", type=int, default=compare.PORT, help="The first of three.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="A model and numbers for a try on a CPU.")
    parser.add_argument("--limit", type=float, default=140.0, help="Seconds for rates and equality, each.")
    args = parser.parse_args()
    if sum(one is not None for one in (args.peer_site, args.peer_python, args.peer_command)) > 1:
        parser.error("--peer-site, --peer-python and --peer-command: give one of them")
    return args


def run(
    script: str, options: dict[str, Any], env: dict[str, str], log: Path, limit: float, python: str = sys.executable
) -> Any:
    """What a script prints in its last line; an error as text if it fails. Its lines of progress are shown."""
    command = [python, "-W", "ignore", str(HERE / script), json.dumps(options)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    late = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    lines = []
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            lines.append(line.rstrip())
            if line.startswith("# "):
                print(line, end="", flush=True)
    process.wait()
    if not late.is_alive():
        lines.append(f"took more than {limit:g} s")
    late.cancel()
    lines = [line for line in lines if line]
    try:
        if process.returncode == 0:
            return json.loads(lines[-1])
    except (IndexError, ValueError):
        pass
    return {"error": "\n".join(lines[-12:]), "log": str(log)}


# --- servers ----------------------------------------------------------------------------------------------------------


def peer_command(args: argparse.Namespace) -> tuple[list[str], dict[str, str]] | None:
    """The command of upstream's server and its environment, which has nothing of this project; None: no peer."""
    env = {**os.environ, **compare.PEER_ENV}
    env.pop("PYTHONPATH", None)
    if args.peer_command:
        return shlex.split(args.peer_command), env
    if args.peer_site:
        env["PYTHONPATH"] = compare.peer_path(args.peer_site)
    elif not args.peer_python:
        return None
    return [args.peer_python or sys.executable, "-W", "ignore", "-m", "sglang.launch_server"], env


def start_servers(args: argparse.Namespace, model: Path, ours: dict[str, str]) -> dict[str, Server]:
    scale = 64 if args.tiny else 1
    every = {"model_path": model, "load_format": "dummy", "skip_tokenizer_init": True}
    every |= {"context_length": 200_000 // scale, "chunked_prefill_size": 8192 // scale, "max_running_requests": 40}
    tier: dict[str, Any] = {"max_total_tokens": 133_120 // scale + (512 if args.tiny else 0)}
    tier |= {"enable_hierarchical_cache": True, "hicache_size": 1 if args.tiny else 40}
    flags = every | {"device": args.device, "cuda_graph_max_bs": 40}
    command = [sys.executable, "-m", "sglang.launch_server"]
    options = {
        WITH: (command, flags | tier | ({"hicache_ratio": 4.0, "hicache_size": 0} if args.tiny else {}), ours),
        WITHOUT: (command, flags | {"max_total_tokens": 24_576, "disable_hierarchical_cache": True}, ours),
    }
    if (peer := peer_command(args)) is not None:
        options[PEER] = (peer[0], every | tier | PEER_OPTIONS | {"attention_backend": args.peer_attention}, peer[1])
    return {
        name: Server(words, options_of, env, args.out.with_name(f"{name.replace(' ', '_')}.log"), args.port + number)
        for number, (name, (words, options_of, env)) in enumerate(options.items())
    }


def session_options(args: argparse.Namespace) -> dict[str, Any]:
    scale = 64 if args.tiny else 1
    return {
        "sessions": [n // scale for n in (16_384, 32_768, 65_536, 131_072)],
        "more": 256 // (16 if args.tiny else 1),
        "rounds": 2,
        "save_limit_s": 20,
        "streams": 4 if args.tiny else 32,
        "stream_tokens": 60 if args.tiny else 360,
        "stream_prompt": 16 if args.tiny else 128,
        "prefix": 100_000 // scale,
        "returns": 3,
        "pause_s": 0.1 if args.tiny else 0.5,
    }


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "input": 32 if args.tiny else 256,
        "output": 16 if args.tiny else 128,
        "requests": 8 if args.tiny else 128,
        "concurrency": 4 if args.tiny else 32,
        "rounds": 1 if args.tiny else 8,
    }


def of_servers(
    args: argparse.Namespace, model: Path, ours: dict[str, str], keep: Callable[[str, Any, list[str] | None], None]
) -> None:
    """Measures one server after the other, and keeps each result as soon as it is there."""
    servers = start_servers(args, model, ours)
    starts: dict[str, Any] = {}
    failed: dict[str, Any] = {}
    try:
        for name, server in servers.items():
            try:
                starts[name] = server.wait(args.peer_limit if name == PEER else 300.0)
            except RuntimeError as error:
                starts[name], failed[name] = None, {"error": str(error)}
        keep("starts", starts, [f"{name}: {s and f'{s:.0f} s'}" for name, s in starts.items()])

        def part(name: str, work: Callable[[], Any], table: Callable[[Any], list[str]], *needs: str) -> Any:
            missing = [failed[server] for server in needs if server in failed]
            try:
                value = missing[0] if missing else work()
            except Exception as error:  # the other parts go on
                value = {"error": repr(error)}
            keep(name, value, None if "error" in value else table(value))
            return value

        ours_too = {name: servers[name] for name in (WITHOUT, WITH)}
        measured = args.measure.split(",")
        if "load" in measured:
            part("load", lambda: asyncio.run(load(ours_too, load_options(args))), load_table, WITH, WITHOUT)
        servers[WITHOUT].stop()
        options = session_options(args)
        sides: dict[str, Any] = {}
        texts: dict[int, list[int]] = {}

        def of_sessions(name: str) -> dict[str, Any]:
            side = asyncio.run(sessions(servers[name], options))
            texts.update(side.pop("texts"))
            return side

        for name in (WITH, PEER):
            if name not in servers or "sessions" not in measured:
                continue
            try:
                sides[name] = failed[name] if name in failed else of_sessions(name)
            except Exception as error:
                sides[name] = failed[name] = {"error": repr(error)}
            keep("sessions", sides, sessions_table(sides))
            if name == WITH and "others" in measured:
                part("others", lambda: asyncio.run(others(servers[WITH], options, texts)), others_table, WITH)
            servers[name].stop()
    finally:
        for server in servers.values():
            server.stop()


def equality_options(args: argparse.Namespace) -> dict[str, Any]:
    engine = {"max_total_tokens": 1536, "max_running_requests": 4, "cuda_graph_max_bs": 4, "device": args.device}
    engine |= {"context_length": 1024, "dtype": "float32"}
    tier = engine | {"enable_hierarchical_cache": True, "hicache_write_policy": "write_through", "hicache_ratio": 10.0}
    servers = {
        "float32, no prefix cache": engine | {"disable_radix_cache": True},
        "float32, main memory": tier,
        "float32, main memory, page size 16": tier | {"page_size": 16},
    }
    if args.tiny:
        servers.pop("float32, main memory, page size 16")
    return {
        "model_path": str(ROOT / "python" / "sglang" / "embedded" / "tiny"),
        "servers": servers,
        "prompts": 8 if args.tiny else 24,
        "requests": 16 if args.tiny else 96,
        "output": 16,
        "vocabulary": 500,
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def rates_table(found: dict[str, Any]) -> list[str]:
    top = found["ceiling"]
    lines = [f"one pinned copy: save {top['save']:.1f}, load {top['load']:.1f} GB/s"]
    lines += ["| cache | page | pieces | way | save GB/s | of pinned | load GB/s | of pinned |", "|" + "---|" * 8]
    for row in found["rows"]:
        wrong = "" if row["right"] else " WRONG BYTES"
        lines.append(
            f"| {row['cache']} | {row['page_size']} | {row['pieces']} | {row['way']}{wrong} | {row['save']:.1f} |"
            f" {row['save'] / top['save']:.2f} | {row['load']:.1f} | {row['load'] / top['load']:.2f} |"
        )
    return lines


def sessions_table(sides: dict[str, Any]) -> list[str]:
    columns = "server, session, computed ms, second turn on the GPU ms, loaded ms (each return), host / device tokens"
    lines = ["| " + columns.replace(", ", " | ") + " | computed / loaded |", "|" + "---|" * (2 + columns.count(", "))]
    for name, side in sides.items():
        if "error" in side:
            lines.append(f"| {name} | failed | {side['error'][-400:]!r} | | | | |")
            continue
        for row, warm in zip(side["computed"], side["on the GPU"], strict=True):
            back = [one for one in side["loaded"] if one["session"] == row["tokens"]]
            times = ", ".join(f"{one['ttft_ms']:.0f}" for one in back)
            places = ", ".join(f"{one.get('host', '?')} / {one.get('device', one['cached'])}" for one in back)
            gain = row["ttft_ms"] / max(one["ttft_ms"] for one in back)
            lines.append(
                f"| {name} | {row['tokens']:,} | {row['ttft_ms']:.0f} | {warm['ttft_ms']:.0f} | {times} | {places} |"
                f" {gain:.1f} |"
            )
        lines.append(f"| {name} | saves waited for: {side['saved_s']:.1f} s | | | | | |")
    return lines


def others_table(found: dict[str, Any]) -> list[str]:
    """1.1 is allowed: of the gaps while a prefix is loaded, over those while it is on the GPU already."""
    columns = (
        "others' gaps, median ms, p99 ms, most ms, p99 while one returns, over on the GPU, returns: ms (host tokens)"
    )
    lines = ["| " + columns.replace(", ", " | ") + " |", "|" + "---|" * (1 + columns.count(", "))]
    base = found.get("on the GPU", {}).get("during", {}).get("p99_ms", float("nan"))
    for name, row in found.items():
        every, during = row["all"], row["during"]
        back = ", ".join(f"{one['ttft_ms']:.0f} ({one.get('host', 0)})" for one in row["returned"])
        lines.append(
            f"| {name} | {every['median_ms']:.2f} | {every['p99_ms']:.2f} | {every['most_ms']:.1f} |"
            f" {during.get('p99_ms', float('nan')):.2f} | {during.get('p99_ms', float('nan')) / base:.2f} | {back} |"
        )
    return lines


def load_table(found: dict[str, Any]) -> list[str]:
    """Medians, and in brackets the median, least and largest ratio to the first server in the same round."""
    keys = ("tok_s", "ttft_ms", "itl_ms", "p99_itl_ms")
    lines = ["| server | " + " | ".join(keys) + " |", "|" + "---|" * (1 + len(keys))]
    for name, row in found["median"].items():
        of_rounds = found["ratios"][name]
        cells = (
            f"{row[key]:.2f} ({statistics.median(of_rounds[key]):.3f}: {min(of_rounds[key]):.3f} to"
            f" {max(of_rounds[key]):.3f})"
            for key in keys
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def equality_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| server | equal answers | tokens loaded |", "|---|---|---|"]
    return lines + [f"| {r['server']} | {r['equal']} of {r['of']} | {r['loaded_tokens']:,} |" for r in rows]


def main() -> None:
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    results: dict[str, Any] = {}
    started = time.perf_counter()

    def keep(name: str, value: Any, lines: list[str] | None) -> None:
        results[name] = value
        args.out.write_text(json.dumps(results, indent=1))
        print(f"\n## {name}: at {time.perf_counter() - started:.0f} s", flush=True)
        print("\n".join(lines) if lines else value, flush=True)

    tables = {"rates": rates_table, "equality": equality_table}
    options = {
        "rates": {"device": args.device, "bytes": (1 << 20) if args.tiny else (1 << 30), "repeats": 2},
        "equality": equality_options(args),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3-4b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY if args.tiny else QWEN3_4B))
        for name in args.parts.split(","):
            if name == "servers":
                of_servers(args, model, ours, keep)
                continue
            value = run(f"{name}.py", options[name], ours, args.out.with_name(f"{name}.log"), args.limit)
            keep(name, value, None if isinstance(value, dict) and "error" in value else tables[name](value))


if __name__ == "__main__":
    main()
