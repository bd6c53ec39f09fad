"""The time to a first token after a start with an empty Triton cache, with kernels compiled ahead and without.

    python lab/gpu/cold_start.py                      # GPU; Qwen3-8B's sizes; three minutes at most
    python lab/gpu/cold_start.py --config gpt-oss-20b --layers 8

Four starts of an engine with random weights, each in a new process: without and with compiling ahead in an empty cache,
then both again in the caches that these left. For each the seconds to the first token, and what the cache got:

    ahead, cold: 17.9 s, 61 kernels, of which 2 (0.8 MB) were compiled by the rank itself
    launched without, and not compiled ahead: 1: extend_kernel

Random weights take no time to read, so a rank waits for its kernels more than it would with a checkpoint, which
`--model-path` names. Ends with FAILED where a warm start with compiling ahead takes a second longer than one without,
or where fewer than nine of ten launched kernels were compiled ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "test" / "srt" / "kernels" / "published"
STARTED = """
import json, sys
from sglang import Engine
if __name__ == "__main__":
    engine = Engine(**json.loads(sys.argv[1]))
    engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 1, "ignore_eos": True})
    print("FIRST TOKEN", flush=True)
    engine.shutdown()
"""
SLOWER_S, COMPILED_AHEAD = 1.0, 0.9


def start(options: dict[str, object], cache: Path, script: Path) -> float:
    """Returns the seconds from the start of a process to its engine's first token."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    began, seconds = time.perf_counter(), 0.0
    command = [sys.executable, str(script), json.dumps(options)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "FIRST TOKEN" in line:
                seconds = time.perf_counter() - began
            elif "ompiled" in line or "Error" in line:
                print("   ", line.rstrip())
    assert run.returncode == 0 and seconds, f"the engine ended with status {run.returncode}"
    return seconds


def kernels(cache: Path, after: float = 0.0) -> dict[str, Path]:
    """Returns key -> code of the kernels in a cache that were compiled after a time."""
    found = cache.glob("*/*.cubin")
    return {code.parent.name: code for code in found if code.stat().st_mtime > after}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="Qwen3-8B", help="a folder of test/srt/kernels/published")
    parser.add_argument("--layers", type=int, help="layers of it; left out: all")
    parser.add_argument("--model-path", help="a checkpoint in the place of random weights")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        script = place / "started.py"
        script.write_text(STARTED)
        options: dict[str, object] = {"model_path": flags.model_path, "log_level": "info"}
        if flags.model_path is None:
            config = json.loads((CONFIGS / flags.config / "config.json").read_text())
            if flags.layers:
                config["num_hidden_layers"] = flags.layers
            (place / "config.json").write_text(json.dumps(config))
            options |= {"model_path": folder, "load_format": "dummy", "skip_tokenizer_init": True}
        seconds = {}
        for kind in ("cold", "warm"):
            for name in ("plain", "ahead"):
                given = {**options, "disable_compile_ahead": name == "plain"}
                seconds[name, kind] = start(given, place / name, script)
                own = ""
                if (name, kind) == ("ahead", "cold"):
                    done = max(path.stat().st_mtime for path in (place / name / "sm120-sglang").iterdir())
                    late = kernels(place / name, done)
                    size = sum(path.stat().st_size for path in late.values()) / 1e6
                    own = f", of which {len(late)} ({size:.1f} MB) were compiled by the rank itself"
                print(f"{name}, {kind}: {seconds[name, kind]:.1f} s, {len(kernels(place / name))} kernels{own}")
        launched, ahead = kernels(place / "plain"), kernels(place / "ahead").keys() - late.keys()
        missed = [code.stem for key, code in launched.items() if key not in ahead]
        print(f"launched without, and not compiled ahead: {len(missed)}: {', '.join(sorted(missed))}")
        wrong = []
        if seconds["ahead", "warm"] > seconds["plain", "warm"] + SLOWER_S:
            wrong.append("a warm start became slower")
        if len(missed) > (1 - COMPILED_AHEAD) * len(launched):
            wrong.append("too few kernels were compiled ahead")
    print(f"FAILED: {', '.join(wrong)}" if wrong else "PASSED")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
