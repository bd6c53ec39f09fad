"""Sleep and wake on one GPU: memory given back, addresses that stay, times, and two models in turn.

    python lab/gpu/sleep_and_wake.py                 # GPU; about four minutes on an H200 machine
    python lab/gpu/sleep_and_wake.py --cases arena   # half a minute: the arenas alone

`arena`: tensors and a CUDA graph in arenas; after a sleep and a wake they have their addresses, the weights their
content, and the graph its result. Memory by nvidia-smi.

`engine`: Qwen3-8B's sizes with random weights and CUDA graphs. Level 1 three times (the later ones without a copy to
main memory) and by tags, level 2: tokens equal before and after, memory by nvidia-smi before, asleep and awake (within
2% of before), seconds and GB/s of what is copied.

`models`: two such models of a quarter of the layers in turn, 20 swaps: tokens equal, memory of the last swap as of the
second, seconds of a swap.

Ends with PASSED, or with FAILED and what is outside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": False, "attention_bias": False,
    "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SMALL_LAYERS, SWAPS = 9, 20
WITHIN = 0.02
PROMPTS = [[1000 + 7 * i + j for j in range(64)] for i in range(8)]
TOKENS = 32
failures: list[str] = []


def expect(true: bool, what: str) -> None:
    if not true:
        failures.append(what)
        print("  OUTSIDE:", what, flush=True)


def used_gb() -> float:
    """GPU memory in use by nvidia-smi, in GB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 2**20 / 1e9


def write_config(folder: Path, layers: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return str(folder)


def arena() -> None:
    from sglang.srt.model_executor.memory_saver.saver import create_saver
    from sglang.srt.utils.engine_state import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    saver = create_saver("cuda")
    before = used_gb()
    with saver.region(WEIGHTS):
        temporary = torch.randn(1 << 28, device="cuda")  # 1 GB, given back at the end of the region
        weight = temporary[: 1 << 26].clone()
        small = torch.arange(1000, device="cuda", dtype=torch.float32)
        del temporary
    with saver.region(KV_CACHE):
        cache = torch.ones(1 << 29, device="cuda")
    x = torch.randn(1 << 24, device="cuda")

    def step() -> torch.Tensor:
        return (x * 2 + weight[: 1 << 24]).cumsum(0)[-1:] + small.sum() + cache[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=saver.graph_pool):
        out = step()
    kept = torch.zeros(1, device="cuda")
    graph.replay()
    kept.copy_(out)
    sizes = saver.sizes()
    print("  arenas (MB):", {tag: size >> 20 for tag, size in sizes.items()}, flush=True)
    expect(sizes[WEIGHTS] < 400 << 20, "what a region freed is given back")
    expect(sizes[CUDA_GRAPH] > 0, "the graph's memory is in its arena")
    awake, places, content = used_gb(), [t.data_ptr() for t in (weight, small, cache)], weight.cpu()
    for number in range(3):
        saver.sleep(TAGS, keep_weights=True)
        asleep = used_gb()
        saver.wake(TAGS)
        again = used_gb()
        expect(torch.equal(weight.cpu(), content), "the weights have their content")
        expect(float(small.sum()) == 499500.0, "so has the small tensor")
        expect(float(cache.max()) == 0.0 == float(cache.min()), "the cache is zero")  # nothing as large beside it
        cache.fill_(1)
        graph.replay()
        expect(torch.equal(out, kept), "the graph gives what it gave")
        print(
            f"  {number}: {before:.2f} GB before, {awake:.2f} awake, {asleep:.2f} asleep, {again:.2f} awake again;",
            {name: round(seconds, 4) for name, seconds in saver.seconds.items()}, flush=True,
        )  # fmt: skip
        expect(awake - asleep > 0.98 * sum(sizes.values()) / 1e9, "memory is given back")
        expect(abs(again - awake) < WITHIN * awake, "memory is taken again, and no more")
    expect([t.data_ptr() for t in (weight, small, cache)] == places, "addresses stay")


def engine_of(path: str, **flags: Any) -> Any:
    import sglang

    return sglang.Engine(
        model_path=path, load_format="dummy", skip_tokenizer_init=True, random_seed=1, enable_memory_saver=True,
        enable_weights_cpu_backup=True, context_length=4096, max_running_requests=16, cuda_graph_max_bs=16,
        disable_radix_cache=True, **flags,
    )  # fmt: skip


def tokens_of(engine: Any) -> list[list[int]]:
    params = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    return [reply["output_ids"] for reply in engine.generate(input_ids=PROMPTS, sampling_params=params)]


def saver_of(engine: Any) -> dict[str, Any]:
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]["memory_saver"]
    return state


def engine(folder: Path) -> None:
    path = write_config(folder / "qwen", CONFIG["num_hidden_layers"])  # type: ignore[arg-type]
    with engine_of(path, mem_fraction_static=0.6) as served:
        expected = tokens_of(served)
        expect(tokens_of(served) == expected, "greedy tokens repeat")
        before = used_gb()
        state = saver_of(served)
        print("  arenas (GB):", {tag: round(size / 1e9, 2) for tag, size in state["bytes"].items()}, flush=True)
        weights = state["bytes"]["weights"] / 1e9
        expect(16 < weights < 17.2, "the weights' arena is as large as the weights")
        for number in range(3):
            started = time.perf_counter()
            served.release_memory_occupation()
            slept = time.perf_counter() - started
            asleep = used_gb()
            started = time.perf_counter()
            served.resume_memory_occupation()
            woke = time.perf_counter() - started
            state, awake = saver_of(served), used_gb()
            seconds = state["seconds"]
            saved, restored = weights / seconds["save"], weights / seconds["restore"]
            print(f"  level 1, {number}: {before:.2f} GB before, {asleep:.2f} asleep, {awake:.2f} awake", flush=True)
            print(
                f"    sleep {slept:.2f} s (in the rank {seconds['sleep']:.2f}, first copy {saved:.1f} GB/s)", flush=True
            )
            print(f"    wake {woke:.2f} s (in the rank {seconds['wake']:.2f}, copy {restored:.1f} GB/s)", flush=True)
            expect(abs(awake - before) < WITHIN * before, "memory awake is as before")
            expect(asleep < 4.0, "asleep at most 4 GB are left")
            expect(tokens_of(served) == expected, "tokens are equal after level 1")
        for tag in ("kv_cache", "weights", "cuda_graph"):
            served.release_memory_occupation([tag])
            print(f"  without {tag}: {used_gb():.2f} GB", flush=True)
            served.resume_memory_occupation([tag])
            expect(tokens_of(served) == expected, f"tokens are equal after {tag} alone")
        started = time.perf_counter()
        served.sleep(level=2)
        slept = time.perf_counter() - started
        asleep, host = used_gb(), saver_of(served)["host_bytes"] / 1e9
        started = time.perf_counter()
        served.wake_up()
        print(
            f"  level 2: {asleep:.2f} GB asleep, {host:.2f} GB of main memory, sleep {slept:.2f} s, wake"
            f" {time.perf_counter() - started:.2f} s", flush=True,
        )  # fmt: skip
        expect(host < 1.0, "level 2 keeps little in main memory")
        expect(tokens_of(served) == expected, "tokens are equal after level 2, which fills the weights again")


def models(folder: Path) -> None:
    path = write_config(folder / "small", SMALL_LAYERS)
    first = engine_of(path, mem_fraction_static=0.6)
    expected = [tokens_of(first)]
    first.release_memory_occupation()
    second = engine_of(path, mem_fraction_static=0.6)
    try:
        expected.append(tokens_of(second))
        pair, used, seconds = (first, second), list[float](), list[float]()
        for swap in range(SWAPS):
            sleeps, wakes = pair[1 - swap % 2], pair[swap % 2]
            started = time.perf_counter()
            sleeps.release_memory_occupation()
            wakes.resume_memory_occupation()
            seconds.append(time.perf_counter() - started)
            used.append(used_gb())
            expect(tokens_of(wakes) == expected[swap % 2], f"tokens are equal after swap {swap}")
        weights = saver_of(first)["bytes"]["weights"] / 1e9
        print(f"  weights {weights:.2f} GB; used after each swap:", [round(gb, 2) for gb in used], flush=True)
        print("  seconds of a swap:", [round(each, 2) for each in seconds], flush=True)
        expect(abs(used[-1] - used[1]) < WITHIN * used[1], "nothing grows with swaps")
    finally:
        first.shutdown()
        second.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["arena", "engine", "models"])
    wanted = parser.parse_args().cases
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            print(name, flush=True)
            started = time.perf_counter()
            if name == "arena":
                arena()
            else:
                {"engine": engine, "models": models}[name](Path(folder))
            print(f"  {time.perf_counter() - started:.0f} s", flush=True)
    print("PASSED" if not failures else f"FAILED: {len(failures)}: {failures}")


if __name__ == "__main__":
    main()
