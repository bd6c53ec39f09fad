"""New weights in a running server on one GPU: tokens of a fresh start, CUDA graphs that stay, seconds and memory.

    python lab/gpu/weight_updates.py                        # GPU; about three minutes on an H200 machine
    python lab/gpu/weight_updates.py --models dense

Random checkpoints of published widths, cut to a few layers: `dense` (Qwen3-8B, 16 bits), `block` (the same in FP8 by
blocks of 128x128) and `moe` (Qwen3-30B-A3B, experts in FP8 by blocks). An engine of the first checkpoint gets the
second one from disk, the first one again (dense: as tensors), and then one with a tensor of another shape, which it
refuses. After each its greedy tokens must be those of a fresh engine of these weights, from the same CUDA graphs.

Ends with PASSED, or with FAILED and what is outside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMMON = {
    "torch_dtype": "bfloat16", "hidden_act": "silu", "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "attention_bias": False, "vocab_size": 32768,
    "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 1, "num_attention_heads": 32,
}  # fmt: skip
DENSE = COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_key_value_heads": 8, "num_hidden_layers": 8,
}  # fmt: skip
MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 3,
    "quantization_config": FP8,
}  # fmt: skip
MODELS = {"dense": DENSE, "block": DENSE | {"quantization_config": FP8}, "moe": MOE}
PROMPTS = [[300 + 11 * i + j for j in range(40)] for i in range(4)]
GREEDY = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
RESULT = "RESULT "
failures: list[str] = []


def expect(true: bool, what: str) -> None:
    if not true:
        failures.append(what)
        print("  OUTSIDE:", what, flush=True)


def by_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix in FP8, and its scales by blocks of 128x128."""
    rows, cols = weight.shape
    blocks = weight.view(rows // 128, 128, cols // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    return (blocks / scale[:, None, :, None]).view(rows, cols).to(torch.float8_e4m3fn), scale


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int) -> str:
    """Writes random weights, and returns the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator("cuda").manual_seed(seed)
    width, heads, kv = config["hidden_size"], 128 * 32, 128 * config["num_key_value_heads"]
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, quantized: bool = False) -> None:
        weight = torch.randn(shape, generator=generator, device="cuda") * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        if len(shape) == 1:
            weight += 1
        if quantized and "quantization_config" in config:
            data, scale = by_blocks(weight)
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = data.cpu(), scale.cpu()
        else:
            tensors[f"{name}.weight"] = weight.bfloat16().cpu()

    for name in ("model.embed_tokens", "lm_head"):
        add(name, config["vocab_size"], width)
    add("model.norm", width)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        for name, rows, cols in (("q", heads, width), ("k", kv, width), ("v", kv, width), ("o", width, heads)):
            add(f"{at}.self_attn.{name}_proj", rows, cols, quantized=True)
        for name, size in (("input_layernorm", width), ("post_attention_layernorm", width)):
            add(f"{at}.{name}", size)
        for name in ("q_norm", "k_norm"):
            add(f"{at}.self_attn.{name}", 128)
        experts = range(config.get("num_experts", 0))
        if experts:
            add(f"{at}.mlp.gate", len(experts), width)
        inter = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        for base in [f"{at}.mlp.experts.{e}" for e in experts] or [f"{at}.mlp"]:
            for name, rows, cols in (("gate", inter, width), ("up", inter, width), ("down", width, inter)):
                add(f"{base}.{name}_proj", rows, cols, quantized=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    torch.cuda.empty_cache()
    return str(folder)


def engine_of(path: str) -> Any:
    import sglang

    return sglang.Engine(
        model_path=path, skip_tokenizer_init=True, context_length=2048, max_total_tokens=16384, max_running_requests=16,
        disable_radix_cache=True, log_level="warning",
    )  # fmt: skip


def tokens_of(engine: Any) -> list[list[int]]:
    return [reply["output_ids"] for reply in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def fresh(path: str) -> None:
    """Prints the tokens of an engine that is started with a checkpoint, and whether they repeat."""
    with engine_of(path) as engine:
        tokens = tokens_of(engine)
        print(RESULT + json.dumps([tokens, tokens_of(engine) == tokens]))


def fresh_tokens(path: str) -> list[list[int]]:
    done = subprocess.run([sys.executable, __file__, "--fresh", path], stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(RESULT))
    tokens, repeat = json.loads(line.removeprefix(RESULT))
    expect(repeat, "tokens of a fresh engine repeat")
    return tokens  # type: ignore[no-any-return]


def updated(engine: Any, path: str, expected: list[list[int]], how: str) -> None:
    """Replaces the weights, and compares."""
    size = Path(path, "model.safetensors").stat().st_size / 1e9
    tensors = load_file(Path(path, "model.safetensors")) if how == "tensors" else {}
    before, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
    if how == "tensors":
        done = engine.update_weights_from_tensor(list(tensors.items()))
    else:
        done = engine.update_weights_from_disk(path)
    seconds = time.perf_counter() - begin
    grown = (before - torch.cuda.mem_get_info()[0]) / 1e9
    expect(bool(done[0]), f"{how}: {done}")
    got = tokens_of(engine)
    equal = sum(a == b for pair in zip(got, expected, strict=True) for a, b in zip(*pair, strict=True))
    total = sum(map(len, expected))
    print(
        f"  {how}: {size:.1f} GB in {seconds:.2f} s, {size / seconds:.1f} GB/s, {grown:+.2f} GB of GPU memory;"
        f" {equal} of {total} tokens of a fresh start", flush=True,
    )  # fmt: skip
    expect(got == expected, f"tokens after {how}")
    expect(grown < 0.1, f"memory after {how}")


def check(name: str, folder: Path) -> None:
    print(name, flush=True)
    first, second = (write_checkpoint(folder / f"{name}{seed}", MODELS[name], seed) for seed in (1, 2))
    wrong = folder / f"{name}-wrong"
    wrong.mkdir()
    tensors = load_file(Path(second, "model.safetensors"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    (wrong / "config.json").write_text(json.dumps(MODELS[name]))
    del tensors
    expected = [fresh_tokens(path) for path in (first, second)]
    expect(expected[0] != expected[1], "the checkpoints differ")
    with engine_of(first) as engine:
        expect(tokens_of(engine) == expected[0], "tokens before")
        updated(engine, second, expected[1], "disk")
        updated(engine, first, expected[0], "tensors" if name == "dense" else "disk")
        done = engine.update_weights_from_disk(str(wrong))
        expect(not done[0], "a tensor of another shape is refused")
        expect(tokens_of(engine) == expected[0], "a refused update leaves the weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--fresh", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fresh:
        fresh(options.fresh)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            check(name, Path(folder))
    print("FAILED: " + "; ".join(failures) if failures else "PASSED")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
