"""Experts in main memory on one GPU, beside the same model resident: tokens, speed, and the rate of the bus.

    python lab/gpu/expert_slots.py                       # GPU; about six minutes on an H200 machine
    python lab/gpu/expert_slots.py --cases resident 32 --layers 8
    python lab/gpu/expert_slots.py --cases resident 32 32+12    # the last with 12 threads of CPUs

Qwen3-30B-A3B's sizes with random weights in FP8 (blocks of 128 x 128). Cases: `resident`; numbers of slots; `full`,
where the script takes GPU memory until the weights do not fit, and the server starts with default flags.
A case prints how long it took to start, its plan, decode speed of 1 and 8 requests, the time of a prompt of 8,000
tokens, and what the formula of docs/expert_offload.md says for the experts that were copied.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.plan.expert_slot_plan import FETCHED, PCIE5

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "vocab_size": 151936,
    "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
    "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
EXPERT_BYTES = 3 * 2048 * 768
TOKENS, PROMPT = 128, 8000
FREE = 22 << 30
"""GPU memory that `full` leaves: the weights take 29 GiB."""
CASES = ("resident", "32", "64", "96", "full")
RESULT = "RESULT "


def write_checkpoint(folder: Path, layers: int) -> None:
    """Writes a config without weights, and a tokenizer."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(DEFAULT_MODEL_PATH) / name, folder)


def flags_of(case: str) -> dict[str, Any]:
    """Returns the flags of a case besides the defaults."""
    slots, _, threads = case.partition("+")
    if not slots.isdecimal():
        return {}
    flags = {"enable_paged_experts": True, "paged_experts_num_resident": int(slots)}
    return flags | ({"kt_cpuinfer": int(threads)} if threads else {})


def run_case(case: str, folder: str) -> dict[str, Any]:
    """Starts an engine, measures, and ends it."""
    from sglang.srt.entrypoints.engine import Engine

    taken = None
    if case == "full":
        taken = torch.empty(torch.cuda.mem_get_info()[0] - FREE, dtype=torch.uint8, device="cuda")
    start = time.perf_counter()
    engine = Engine(model_path=folder, load_format="dummy", random_seed=7, log_level="info", **flags_of(case))
    result: dict[str, Any] = {"case": case, "start_s": time.perf_counter() - start}
    plan = engine.get_server_info()
    for name in ("expert_slots", "chunked_prefill_size", "max_running_requests", "cuda_graph_bs"):
        result[name] = plan.get(name)
    choose = random.Random(3)

    def ids(length: int) -> list[int]:
        return [choose.randrange(1000, 150000) for _ in range(length)]

    def timed(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - begin, [answer["output_ids"] for answer in answers]

    def copied() -> tuple[int, int]:
        state = plan_state(engine).get("expert_slots", {"chosen": 0, "copied": 0})
        return state["chosen"], state["copied"]

    result["tokens"] = timed([ids(length) for length in (5, 37, 300)], 24)[1] + timed([ids(9)], 24)[1]
    for requests in (1, 8):
        prompts = [ids(20) for _ in range(requests)]
        timed(prompts, 8)
        before = copied()
        short, long = timed(prompts, TOKENS // 4)[0], timed(prompts, TOKENS + TOKENS // 4)[0]
        chosen, missed = (now - then for now, then in zip(copied(), before, strict=True))
        step = (long - short) / TOKENS
        result[f"decode_{requests}"] = {
            "ms": 1e3 * step, "tokens_per_s": requests / step,
            "found": 1 - missed / chosen if chosen else None,
            "bus_ms_by_formula": 1e3 * missed / (1.5 * TOKENS) * EXPERT_BYTES / (FETCHED * PCIE5),
        }  # fmt: skip
    timed([ids(PROMPT)], 1)
    result["prompt_s"] = min(timed([ids(PROMPT)], 1)[0] for _ in range(2))
    result["cpus"] = plan_state(engine).get("cpu_experts")
    engine.shutdown()
    del taken
    return result


def plan_state(engine: Any) -> dict[str, Any]:
    """Returns the state of the first scheduler."""
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return state


def bus_rates() -> dict[str, float]:
    """Measures the copies of experts out of page-locked main memory, in bytes a second."""
    from sglang.srt.layers.moe.slot_ops import ExpertCopies, Moves
    from sglang.srt.layers.triton_ops import expert_slots as kernels
    from sglang.srt.mem_cache.main_memory import map_memory, register

    device, num = torch.device("cuda"), 128
    memory = map_memory(num * EXPERT_BYTES)
    memory.random_(0, 255)
    assert register(memory) == 0, "main memory cannot be page-locked"
    bank = memory.view(num, EXPERT_BYTES)
    target = torch.empty_like(bank, device=device)
    copies = kernels.prepare_copies(ExpertCopies([bank], [target], [target]))
    rates = {}
    for count in (1, 8, num):
        moves = Moves.room_for(num, device)
        moves.rows[:, 0] = moves.rows[:, 1] = torch.arange(num, dtype=torch.int32)
        moves.count.fill_(count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        kernels.copy_experts(copies, moves)
        begin.record()
        for _ in range(10):
            kernels.copy_experts(copies, moves)
        end.record()
        end.synchronize()
        rates[f"{count} experts"] = 10 * count * EXPERT_BYTES / begin.elapsed_time(end) * 1e3
    assert torch.equal(target.cpu(), bank), "copies differ"
    begin.record()
    for _ in range(3):
        target.copy_(bank, non_blocking=True)
    end.record()
    end.synchronize()
    rates["copy engine"] = 3 * num * EXPERT_BYTES / begin.elapsed_time(end) * 1e3
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(RESULT + json.dumps(run_case(*options.run)), flush=True)
        return
    print("Rates of copies, GB/s:", {name: round(rate / 1e9, 1) for name, rate in bus_rates().items()}, flush=True)
    folder = Path(tempfile.mkdtemp())
    write_checkpoint(folder, options.layers)
    tokens = None
    for case in options.cases:
        child = subprocess.run(
            [sys.executable, __file__, "--run", case, str(folder)], capture_output=True, text=True, check=False
        )
        lines = [line for line in child.stdout.splitlines() if line.startswith(RESULT)]
        if not lines:
            print(f"{case}: FAILED\n{child.stdout[-2500:]}\n{child.stderr[-2500:]}", flush=True)
            continue
        result = json.loads(lines[0].removeprefix(RESULT))
        got = result.pop("tokens")
        tokens = tokens or got
        equal = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(got, tokens, strict=True)]
        print(json.dumps({**result, "equal_tokens_of_24": equal}), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
