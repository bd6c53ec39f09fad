"""Prefixes in main memory on one GPU: rates of copies, equal answers, returning sessions, and what others notice.

    python benchmark/hicache/bench_hicache.py --out results.json [--parts rates,equality,sessions,load]
        [--peer-site DIR | --peer-python PATH | --peer-command COMMAND] [--device cpu --tiny]

Weights of Qwen3-8B's shapes are random; only `equality` uses a trained model, the embedded one. The part
`sessions` runs upstream's HiCache in the same run, too: with --peer-site (see `benchmark/peers/compare.py`) in this
interpreter, with --peer-python in another one that has it, with --peer-command as a server that the command starts,
behind which the flags of the session are put. Prints progress and tables; --out gets everything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "benchmark" / "peers"))
import compare  # noqa: E402

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TINY = QWEN3_8B | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 16384, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TIER = {"enable_hierarchical_cache": True, "hicache_write_policy": "write_through"}
PEER_OPTIONS = {
    "sampling_backend": "pytorch", "grammar_backend": "none", "page_size": 64, "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first",
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="rates,equality,sessions,load")
    parser.add_argument("--peer-site", help="Folder with upstream and its dependencies.")
    parser.add_argument("--peer-python", help="Interpreter that has upstream.")
    parser.add_argument("--peer-command", help="As `sglang serve`: starts a server when flags are put behind it.")
    parser.add_argument("--peer-attention", default="flashinfer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="A model and numbers for a try on a CPU.")
    parser.add_argument("--limit", type=float, default=140.0, help="Seconds for one process.")
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


def session_options(args: argparse.Namespace, model: Path, peer: bool) -> dict[str, Any]:
    scale = 64 if args.tiny else 1
    lengths = [n // scale for n in (16_384, 32_768, 65_536, 131_072)]
    engine = {
        "max_total_tokens": 133_120 // scale + (512 if args.tiny else 0),
        "max_running_requests": 40,
        "cuda_graph_max_bs": 40,
        "hicache_size": (0.05 if args.tiny else 48 if peer else 52),
        "chunked_prefill_size": 8192 // scale,
        "context_length": 200_000 // scale,
        **TIER,
    }
    if peer:
        engine |= PEER_OPTIONS | {"attention_backend": args.peer_attention, "mem_fraction_static": 0.85}
        engine["hicache_size"] = int(engine["hicache_size"])
    else:
        engine["device"] = args.device
    return {
        "model_path": str(model),
        "engine": engine,
        "sessions": lengths,
        "more": 256 // (16 if args.tiny else 1),
        "rounds": 2,
        "save_limit_s": 60,
        "streams": 0 if peer else 4 if args.tiny else 32,
        "stream_tokens": 60 if args.tiny else 360,
        "stream_prompt": 16 if args.tiny else 128,
        "prefix": 100_000 // scale,
        "returns": 3,
        "pause_s": 0.1 if args.tiny else 0.7,
        "command": args.peer_command if peer else None,
    }


def load_options(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    engine = {
        "max_total_tokens": 49_152, "max_running_requests": 64, "cuda_graph_max_bs": 64, "device": args.device,
        "context_length": 2048, "mem_fraction_static": 0.4,
    }  # fmt: skip
    size = 0.05 if args.tiny else 8
    return {
        "model_path": str(model),
        "servers": {
            "without": engine | {"disable_hierarchical_cache": True},
            "second hit (default)": engine | {"enable_hierarchical_cache": True, "hicache_size": size},
        },
        "input": 32 if args.tiny else 512,
        "output": 16 if args.tiny else 128,
        "requests": 8 if args.tiny else 256,
        "concurrency": 4 if args.tiny else 64,
        "rounds": 1 if args.tiny else 3,
    }


def equality_options(args: argparse.Namespace) -> dict[str, Any]:
    engine = {"max_total_tokens": 1536, "max_running_requests": 4, "cuda_graph_max_bs": 4, "device": args.device}
    engine |= {"context_length": 1024, "dtype": "float32"}
    tier = engine | TIER | {"hicache_ratio": 10.0}
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
    lines = [
        "| server | session | computed ms | loaded ms (each return) | host / device tokens |",
        "|---|---|---|---|---|",
    ]
    for name, found in sides.items():
        if "error" in found:
            lines.append(f"| {name} | failed | {found['error'][-400:]!r} | | |")
            continue
        for row in found["computed"]:
            back = [one for one in found["loaded"] if abs(one["session"] - row["tokens"]) <= 1]
            times = ", ".join(f"{one['ttft_ms']:.0f}" for one in back)
            places = ", ".join(f"{one.get('host', '?')} / {one.get('device', one['cached'])}" for one in back)
            lines.append(f"| {name} | {row['tokens']:,} | {row['ttft_ms']:.0f} | {times} | {places} |")
        lines.append(f"| {name} | saves waited for: {found['saved_s']:.1f} s; start {found['start_s']:.0f} s | | | |")
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
    keys = ("tok_s", "ttft_ms", "itl_ms", "p99_itl_ms")
    base = found["median"]["without"]
    lines = ["| server | " + " | ".join(keys) + " |", "|" + "---|" * (1 + len(keys))]
    for name, row in found["median"].items():
        lines.append(f"| {name} | " + " | ".join(f"{row[key]:.2f} ({row[key] / base[key]:.3f})" for key in keys) + " |")
    return lines


def equality_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| server | equal answers | tokens loaded |", "|---|---|---|"]
    return lines + [f"| {r['server']} | {r['equal']} of {r['of']} | {r['loaded_tokens']:,} |" for r in rows]


def peer_sessions(args: argparse.Namespace, model: Path) -> Any:
    """Upstream's sessions. A command has the environment of this process, without this project's packages."""
    env = {**os.environ, **compare.PEER_ENV}
    env.pop("PYTHONPATH", None)
    if args.peer_site:
        env["PYTHONPATH"] = compare.peer_path(args.peer_site)
    log = args.out.with_name("sessions_peer.log")
    python = args.peer_python or sys.executable
    return run("sessions.py", session_options(args, model, True), env, log, args.limit, python)


def main() -> None:
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    parts = args.parts.split(",")
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    found: dict[str, Any] = {}

    def keep(name: str, value: Any, lines: list[str] | None) -> None:
        found[name] = value
        args.out.write_text(json.dumps(found, indent=1))
        print(f"\n## {name}: {time.perf_counter() - started:.0f} s", flush=True)
        print("\n".join(lines) if lines else value, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3-8b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY if args.tiny else QWEN3_8B))

        def part(script: str, name: str, options: dict[str, Any], env: dict[str, str]) -> Any:
            return run(script, options, env, args.out.with_name(f"{name}.log"), args.limit)

        tables = {"rates": rates_table, "equality": equality_table, "load": load_table}
        options = {
            "rates": {"device": args.device, "bytes": (1 << 20) if args.tiny else (2 << 30), "repeats": 3},
            "equality": equality_options(args),
            "load": load_options(args, model),
        }
        for name in parts:
            started = time.perf_counter()
            if name != "sessions":
                value = part(f"{name}.py", name, options[name], ours)
                keep(name, value, None if isinstance(value, dict) and "error" in value else tables[name](value))
                continue
            sides = {"ours": part("sessions.py", "sessions", session_options(args, model, False), ours)}
            keep("sessions", sides, sessions_table(sides))
            if "others" in sides["ours"]:
                keep("others", sides["ours"]["others"], others_table(sides["ours"]["others"]))
            if args.peer_site or args.peer_python or args.peer_command:
                started = time.perf_counter()
                sides["peer"] = peer_sessions(args, model)
                keep("sessions", sides, sessions_table(sides))


if __name__ == "__main__":
    main()
