"""LoRA adapters on one GPU: answers beside weights with the adapter merged in, and speed beside a server without.

    python lab/gpu/adapters_on_gpu.py                    # GPU; about twelve minutes on an H200 machine
    python lab/gpu/adapters_on_gpu.py --cases experts    # one of answers, speed and experts

`answers`: four layers of Qwen3-8B's widths with random weights. The log probabilities of prompts with each adapter
(ranks 1, 16 and 64), all in one batch, differ from those of a model whose weights have the adapter merged in by at most
a tenth of what the adapter changes. With the adapters' prompts mixed, each has the tokens that it has alone.

`speed`: all layers with random weights, decode steps of 1 and 64 requests: a server without --enable-lora, one with it
and requests without adapters, with one adapter of rank 16, and with eight. Without adapters at most 2% slower, with one
or eight at most 10% at one request and 15% at 64.

`experts`: two layers of Qwen3-30B-A3B's sizes with random weights, in 16 bits and in FP8 by blocks (quantized here),
and adapters of all experts of rank 16. The log probabilities of a batch with both adapters and without differ from
those of models that have the adapter merged in by at most a tenth of what the adapter changes (in FP8, a third: merged
weights are rounded differently). Then all 48 layers with random FP8 weights: the time of decode steps of 1 and 64
requests with one adapter, beside the same server's requests without; these are reported, and nothing is required.

Ends with PASSED, or with FAILED and what is outside.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": False, "attention_bias": False,
    "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FEW_LAYERS, SMALL_VOCABULARY = 4, 8192
SHAPES = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (12288, 4096), "mlp.up_proj": (12288, 4096),
    "mlp.down_proj": (4096, 12288),
}  # fmt: skip
RANKS = (1, 16, 64)
PROMPT, TOKENS = 128, 256
MOST_SHARE = 0.1
LIMITS = {("none", 1): 1.02, ("none", 64): 1.02, ("one", 1): 1.10, ("one", 64): 1.15, ("eight", 64): 1.15}
RESULT = "RESULT "
CASES = ("answers", "speed", "experts")


def modules(layers: int) -> list[tuple[str, tuple[int, int]]]:
    return [(f"model.layers.{i}.{name}", shape) for i in range(layers) for name, shape in SHAPES.items()]


def write_adapter(folder: Path, layers: int, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Writes a random adapter, and returns what it adds to each weight."""
    folder.mkdir()
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors, deltas = {}, {}
    for name, (rows, cols) in modules(layers):
        a = torch.randn(rank, cols, generator=generator, device="cuda") * cols**-0.5
        b = torch.randn(rows, rank, generator=generator, device="cuda") * 0.3 * rank**-0.5
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.cpu()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.cpu()
        if layers == FEW_LAYERS:
            deltas[f"{name}.weight"] = b.float() @ a.float()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def write_model(folder: Path, layers: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Writes the config, and returns random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers, "vocab_size": vocabulary}))
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, scale: float | None = None) -> None:
        values = torch.randn(*shape, generator=generator, device="cuda") if scale else torch.ones(shape, device="cuda")
        weights[name] = values * (scale or 1.0)

    for name, (rows, cols) in modules(layers):
        add(f"{name}.weight", rows, cols, scale=cols**-0.5)
    for i in range(layers):
        for norm, size in (
            ("input_layernorm", 4096), ("post_attention_layernorm", 4096), ("self_attn.q_norm", 128),
            ("self_attn.k_norm", 128),
        ):  # fmt: skip
            add(f"model.layers.{i}.{norm}.weight", size)
    add("model.norm.weight", 4096)
    add("model.embed_tokens.weight", vocabulary, 4096, scale=1.0)
    add("lm_head.weight", vocabulary, 4096, scale=0.05)
    return weights


def save_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    stored = {name: weight.to(torch.bfloat16).cpu() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors")


def prompts(count: int, vocabulary: int, seed: int = 5) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(100, vocabulary) for _ in range(PROMPT)] for _ in range(count)]


def log_probabilities(engine: Any, ids: list[list[int]], adapters: list[str | None]) -> list[torch.Tensor]:
    """Returns those of each prompt's tokens but the first."""
    results = engine.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0}, return_logprob=True,
        logprob_start_len=0, lora_path=adapters,
    )  # fmt: skip
    return [torch.tensor([entry[0] for entry in one["meta_info"]["input_token_logprobs"][1:]]) for one in results]


def answers(root: Path) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    weights = write_model(root / "model", FEW_LAYERS, SMALL_VOCABULARY)
    save_weights(root / "model", weights)
    for rank in RANKS:
        deltas = write_adapter(root / f"r{rank}", FEW_LAYERS, rank, seed=rank)
        write_model(root / f"merged{rank}", FEW_LAYERS, SMALL_VOCABULARY)
        save_weights(root / f"merged{rank}", {name: w + deltas.get(name, 0) for name, w in weights.items()})
    del weights, deltas
    torch.cuda.empty_cache()
    ids, names = prompts(4, SMALL_VOCABULARY), [None, *(f"r{rank}" for rank in RANKS)]
    common = {"skip_tokenizer_init": True, "mem_fraction_static": 0.5, "disable_radix_cache": True}
    with Engine(
        model_path=str(root / "model"), lora_paths=[f"r{rank}={root / f'r{rank}'}" for rank in RANKS], **common
    ) as engine:
        asked = [(prompt, name) for prompt in ids for name in names]
        mixed = log_probabilities(engine, [prompt for prompt, _ in asked], [name for _, name in asked])
        greedy = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
        together = engine.generate(
            input_ids=[p for p, _ in asked], sampling_params=greedy, lora_path=[n for _, n in asked]
        )
        alone = [
            engine.generate(input_ids=[prompt], sampling_params=greedy, lora_path=name)[0] for prompt, name in asked
        ]
    first = [a["output_ids"][0] == b["output_ids"][0] for a, b in zip(together, alone, strict=True)]
    result: dict[str, Any] = {"first_tokens_equal": sum(first) / len(first)}
    base = mixed[:: len(names)]
    for number, rank in enumerate(RANKS, 1):
        with Engine(model_path=str(root / f"merged{rank}"), **common) as engine:
            merged = log_probabilities(engine, ids, [None] * len(ids))
        ours = mixed[number :: len(names)]
        off = torch.cat([(a - b).abs() for a, b in zip(ours, merged, strict=True)]).mean()
        change = torch.cat([(a - b).abs() for a, b in zip(base, merged, strict=True)]).mean()
        result[f"rank {rank}"] = {"off": float(off), "change": float(change), "share": float(off / change)}
    return result


def speed(root: Path, enable: bool) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    folder = root / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    flags: dict[str, Any] = {}
    if enable:
        for number in range(8):
            write_adapter(root / f"a{number}", CONFIG["num_hidden_layers"], 16, number)  # type: ignore[arg-type]
        torch.cuda.empty_cache()
        flags = {"lora_paths": [f"a{number}={root / f'a{number}'}" for number in range(8)], "max_loras_per_batch": 8}
    cases = {"none": [None], "one": ["a0"], "eight": [f"a{n}" for n in range(8)]} if enable else {"without": [None]}
    result: dict[str, Any] = {}
    with Engine(
        model_path=str(folder), load_format="dummy", skip_tokenizer_init=True, disable_radix_cache=True,
        mem_fraction_static=0.6, max_running_requests=64, **flags,
    ) as engine:  # fmt: skip
        for name, adapters in cases.items():
            for count in (1, 64):
                ids = prompts(count, 150000)
                names = [adapters[i % len(adapters)] for i in range(count)]

                def seconds(tokens: int, ids: list[list[int]] = ids, names: list[str | None] = names) -> float:
                    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                    begin = time.perf_counter()
                    engine.generate(input_ids=ids, sampling_params=sampling, lora_path=names if enable else None)
                    return time.perf_counter() - begin

                seconds(8)
                steps = [(seconds(TOKENS) - seconds(1)) / (TOKENS - 1) for _ in range(3)]
                result[f"{name} {count}"] = min(steps) * 1000
    return result


EXPERT_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": False,
    "attention_bias": False, "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERT_SHAPES = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
EXPERT_RANK, EXPERT_LAYERS = 16, 2
FP8_SHARE = 0.33
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


def expert_weights(vocabulary: int) -> dict[str, torch.Tensor]:
    """Returns random weights of EXPERT_LAYERS layers."""
    generator = torch.Generator(device="cuda").manual_seed(2)
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, scale: float | None = None) -> None:
        values = torch.randn(*shape, generator=generator, device="cuda") if scale else torch.ones(shape, device="cuda")
        weights[name] = values * (scale or 1.0)

    for i in range(EXPERT_LAYERS):
        at = f"model.layers.{i}"
        for name, rows, cols in (("q", 4096, 2048), ("k", 512, 2048), ("v", 512, 2048), ("o", 2048, 4096)):
            add(f"{at}.self_attn.{name}_proj.weight", rows, cols, scale=cols**-0.5)
        add(f"{at}.mlp.gate.weight", 128, 2048, scale=2048**-0.5)
        for expert in range(128):
            for name, (rows, cols) in EXPERT_SHAPES.items():
                add(f"{at}.mlp.experts.{expert}.{name}.weight", rows, cols, scale=cols**-0.5)
        for norm, size in (
            ("input_layernorm", 2048), ("post_attention_layernorm", 2048), ("self_attn.q_norm", 128),
            ("self_attn.k_norm", 128),
        ):  # fmt: skip
            add(f"{at}.{norm}.weight", size)
    add("model.norm.weight", 2048)
    add("model.embed_tokens.weight", vocabulary, 2048, scale=1.0)
    add("lm_head.weight", vocabulary, 2048, scale=0.05)
    return weights


def write_expert_adapter(folder: Path, layers: int, seed: int, merge: bool) -> dict[str, torch.Tensor]:
    """Writes a random adapter of all experts, and returns what it adds to each weight if `merge`."""
    folder.mkdir()
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors, deltas = {}, {}
    for layer in range(layers):
        for name, (rows, cols) in EXPERT_SHAPES.items():
            at = f"model.layers.{layer}.mlp.experts"
            a = (torch.randn(128, EXPERT_RANK, cols, generator=generator, device="cuda") * cols**-0.5).bfloat16()
            b = (torch.randn(128, rows, EXPERT_RANK, generator=generator, device="cuda") * 0.1).bfloat16()
            tensors |= {
                f"base_model.model.{at}.{name}.lora_A": a.cpu(),
                f"base_model.model.{at}.{name}.lora_B": b.cpu(),
            }
            for expert in range(128 if merge else 0):
                deltas[f"{at}.{expert}.{name}.weight"] = b[expert].float() @ a[expert].float()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": EXPERT_RANK, "lora_alpha": EXPERT_RANK, "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def save_expert_model(folder: Path, weights: dict[str, torch.Tensor], vocabulary: int, fp8: bool) -> None:
    """Writes a model, its linear layers in FP8 by blocks of 128 x 128 if asked to."""
    folder.mkdir()
    config: dict[str, Any] = {**EXPERT_CONFIG, "num_hidden_layers": EXPERT_LAYERS, "vocab_size": vocabulary}
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not fp8 or "_proj." not in name:
            stored[name] = weight.bfloat16().cpu()
            continue
        blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = codes.flatten(2, 3).flatten(0, 1).cpu()
        stored[name.removesuffix("weight") + "weight_scale_inv"] = scale.cpu()
    if fp8:
        config["quantization_config"] = FP8_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")


def experts(root: Path) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    common = {"skip_tokenizer_init": True, "mem_fraction_static": 0.5, "disable_radix_cache": True}
    weights, ids, result = expert_weights(SMALL_VOCABULARY), prompts(4, SMALL_VOCABULARY), {}
    deltas = {name: write_expert_adapter(root / name, EXPERT_LAYERS, n, True) for n, name in enumerate(("a", "b"))}
    names: list[str | None] = [None, "a", "b"]
    for fp8 in (False, True):
        kind = "fp8" if fp8 else "bf16"
        save_expert_model(root / kind, weights, SMALL_VOCABULARY, fp8)
        paths = [f"{name}={root / name}" for name in deltas]
        with Engine(model_path=str(root / kind), lora_paths=paths, **common) as engine:
            asked = [(prompt, name) for prompt in ids for name in names]
            mixed = log_probabilities(engine, [prompt for prompt, _ in asked], [name for _, name in asked])
        for number, name in enumerate(deltas, 1):
            merged = {key: w + deltas[name].get(key, 0) for key, w in weights.items()}
            save_expert_model(root / f"{kind} {name}", merged, SMALL_VOCABULARY, fp8)
            with Engine(model_path=str(root / f"{kind} {name}"), **common) as engine:
                wanted = log_probabilities(engine, ids, [None] * len(ids))
            off = torch.cat([(a - b).abs() for a, b in zip(mixed[number::3], wanted, strict=True)]).mean()
            change = torch.cat([(a - b).abs() for a, b in zip(mixed[::3], wanted, strict=True)]).mean()
            result[f"{kind} {name}"] = {"off": float(off), "change": float(change), "share": float(off / change)}
    return result


def expert_speed(root: Path) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    folder = root / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**EXPERT_CONFIG, "quantization_config": FP8_CONFIG}))
    write_expert_adapter(root / "a", 48, 1, False)
    torch.cuda.empty_cache()
    result: dict[str, Any] = {}
    with Engine(
        model_path=str(folder), load_format="dummy", skip_tokenizer_init=True, disable_radix_cache=True,
        mem_fraction_static=0.7, max_running_requests=64, lora_paths=[f"a={root / 'a'}"], max_loras_per_batch=2,
    ) as engine:  # fmt: skip
        for name in (None, "a"):
            for count in (1, 64):
                ids = prompts(count, 150000)

                def seconds(tokens: int, ids: list[list[int]] = ids, name: str | None = name) -> float:
                    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                    begin = time.perf_counter()
                    engine.generate(input_ids=ids, sampling_params=sampling, lora_path=[name] * len(ids))
                    return time.perf_counter() - begin

                seconds(8)
                steps = [(seconds(TOKENS) - seconds(1)) / (TOKENS - 1) for _ in range(3)]
                result[f"{name or 'none'} {count}"] = min(steps) * 1000
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        with tempfile.TemporaryDirectory() as folder:
            work = {
                "answers": answers, "without": lambda root: speed(root, False), "with": lambda r: speed(r, True),
                "experts": experts, "expert_speed": expert_speed,
            }  # fmt: skip
            print(RESULT + json.dumps(work[asked.run](Path(folder))))
        return
    problems: list[str] = []
    if "answers" in asked.cases:
        result = _in_process("answers")
        print(json.dumps(result, indent=1))
        problems += [f"{name}: {r}" for name, r in result.items() if name[0] == "r" and r["share"] > MOST_SHARE]
        problems += ["first tokens"] if result["first_tokens_equal"] < 1 else []
    if "speed" in asked.cases:
        without, with_adapters = _in_process("without"), _in_process("with")
        for (name, count), limit in LIMITS.items():
            ratio = with_adapters[f"{name} {count}"] / without[f"without {count}"]
            print(
                f"{name:6} {count:3} requests: {with_adapters[f'{name} {count}']:.3f} ms a step, {ratio:.3f} of without"
            )
            problems += [f"{name} {count}: {ratio:.3f} above {limit}"] if ratio > limit else []
    if "experts" in asked.cases:
        result = _in_process("experts")
        print(json.dumps(result, indent=1))
        limits = {name: FP8_SHARE if name.startswith("fp8") else MOST_SHARE for name in result}
        problems += [f"experts, {name}: {r}" for name, r in result.items() if r["share"] > limits[name]]
        times = _in_process("expert_speed")
        for count in (1, 64):
            ratio = times[f"a {count}"] / times[f"none {count}"]
            print(f"experts {count:3} requests: {times[f'a {count}']:.3f} ms a step, {ratio:.3f} of without")
    print("FAILED: " + "; ".join(problems) if problems else "PASSED")
    sys.exit(bool(problems))


def _in_process(case: str) -> dict[str, Any]:
    """Runs a case in a process of its own, so that nothing of it stays on the GPU."""
    done = subprocess.run([sys.executable, __file__, "--run", case], stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(RESULT))
    result: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return result


if __name__ == "__main__":
    main()
