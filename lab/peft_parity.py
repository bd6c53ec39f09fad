"""python lab/peft_parity.py: the server's LoRA adapters against PEFT itself, on tiny models in fp32.

PEFT makes each adapter from a `LoraConfig` and saves it; B is random. The server reads what was saved, and its greedy
tokens and their log probabilities are compared with PEFT's own model: as it computes, with A and B beside the weights,
and merged. Prints a row for each model and form; ends with 1 if a token differs.

Needs `peft` and `accelerate`: `pip install --no-deps peft accelerate`.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "test")]

from srt.managers.fake_runner import Collector, add, request, run_to_end  # noqa: E402
from srt.models.harness import VOCAB, save_tiny  # noqa: E402

from sglang.srt.configs.adapters.files import content_id  # noqa: E402
from sglang.srt.managers.scheduler.output import StopChecker  # noqa: E402
from sglang.srt.managers.scheduler.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler.scheduler_setup import create_runner  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

TOKENS, PROMPTS, LENGTH = 8, 4, 20
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
FORMS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"r": 8, "target_modules": ATTENTION},
    "feed-forward": {"r": 4, "target_modules": DENSE},
    "all-linear": {"r": 4, "target_modules": "all-linear"},
    "rslora": {"r": 9, "target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 5},
    "patterns": {
        "r": 4, "target_modules": ATTENTION, "rank_pattern": {"q_proj": 9, "layers.1.self_attn.o_proj": 17},
        "alpha_pattern": {"o_proj": 3, r".*\.0\..*v_proj": 11},
    },
    "patterns, rslora": {
        "r": 4, "target_modules": ATTENTION, "use_rslora": True,
        "rank_pattern": {"^model.layers.1.self_attn.q_proj": 2},
    },
    "one layer": {"r": 8, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "DoRA": {"r": 8, "target_modules": [*ATTENTION, *DENSE], "use_dora": True},
    "DoRA, rslora": {"r": 5, "target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True},
    "a pattern, without o_proj": {"r": 8, "target_modules": r".*self_attn\..*_proj", "exclude_modules": ["o_proj"]},
}  # fmt: skip
ENDS: Mapping[str, Mapping[str, Any]] = {
    "embedding": {"r": 8, "target_modules": ["embed_tokens"]},
    "output head": {"r": 8, "target_modules": ["lm_head"], "use_rslora": True},
    "embedding, output head and attention": {"r": 4, "target_modules": ["embed_tokens", "lm_head", *ATTENTION]},
    "DoRA of the embedding": {"r": 8, "target_modules": ["embed_tokens"], "use_dora": True},
    "DoRA of the output head": {"r": 8, "target_modules": ["lm_head"], "use_dora": True},
    "embedding, tied": {"r": 8, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", *ATTENTION]
MODELS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "qwen3": {**FORMS, **ENDS},
    "qwen3_tied_bias": ENDS,
    "gemma3_capped": ENDS,
    "llama_bias_llama3": FORMS,
    "qwen3_moe": {
        "attention": FORMS["attention"],
        "experts": {"r": 4, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        "attention and experts": {
            "r": 4, "target_modules": ATTENTION, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    },
    "deepseek_v3": {"latents": {"r": 8, "target_modules": LATENT}},
    "qwen3_5": {"gated delta": {"r": 8, "target_modules": DELTA}},
}  # fmt: skip
"""Tiny models of the tests, and what is trained of each."""


def made(base: torch.nn.Module, form: Mapping[str, Any], folder: Path, seed: int) -> peft.PeftModel:
    """Returns PEFT's model with an adapter whose B is not zero, which it saves."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **form)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                weight.normal_(0, 0.1 * weight.shape[1] ** -0.5)
            elif "lora_magnitude" in name:
                weight.mul_(torch.rand_like(weight) + 0.5)
    model.save_pretrained(folder)
    return model


def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """Returns the likeliest tokens behind a prompt, and their log probabilities."""
    tokens, scores = list(ids), []
    for _ in range(TOKENS):
        with torch.inference_mode():
            row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(row.argmax()))
        scores.append(float(row.max()))
    return tokens[len(ids) :], scores


def served(scheduler: Scheduler, adapter: str, folder: Path, prompts: list[list[int]]) -> Collector:
    """Returns what the server says to prompts with an adapter."""
    table = scheduler.adapters
    assert table is not None
    table.begin(adapter, str(folder))
    problem = table.end(adapter, pinned=False)
    assert not problem, problem
    for number, ids in enumerate(prompts):
        message = request(f"{number}", ids, TOKENS, temperature=0.0, ignore_eos=True)
        message.adapter = message.cache_namespace = adapter
        message.return_logprob, message.logprob_start_len = True, len(ids)
        add(scheduler, message)
    collector = Collector()
    run_to_end(scheduler, collector)
    table.unload(adapter)
    return collector


def compare(name: str, folder: Path) -> int:
    """Prints a row for each form of a model. Returns how many tokens differ."""
    base = save_tiny(name, folder / "model")
    paths = {form: folder / f"{number}" for number, form in enumerate(MODELS[name])}
    trained = {form: made(base, MODELS[name][form], paths[form], number) for number, form in enumerate(paths)}
    scaled = [str(path) for form, path in paths.items() if MODELS[name][form].get("use_dora")]
    args = ServerArgs.from_kwargs(
        model_path=str(folder / "model"), device="cpu", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=64,
        lora_target_modules=["all"], max_total_tokens=4096, max_running_requests=8, disable_shared_experts_fusion=True,
        lora_paths=scaled[:1] or None,
    )  # fmt: skip
    scheduler = Scheduler(args, create_runner(args), StopChecker(None))
    prompts = [
        torch.randint(1, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(PROMPTS)
    ]
    alone, wrong = [greedy(base, ids)[0] for ids in prompts], 0
    for form, path in paths.items():
        model = trained[form]
        beside = [greedy(model, ids) for ids in prompts]
        merged = [greedy(model.merge_and_unload(), ids)[0] for ids in prompts]
        collector = served(scheduler, content_id(path), path, prompts)
        equal = [collector.tokens[f"{i}"] == tokens for i, (tokens, _) in enumerate(beside)]
        apart = max(
            abs(ours - theirs)
            for i, (_, scores) in enumerate(beside)
            for ours, theirs in zip(collector.logprobs[f"{i}"], scores, strict=True)
        )
        changed = sum(tokens != of_base for (tokens, _), of_base in zip(beside, alone, strict=True))
        print(
            f"{name}, {form}: {sum(equal)} of {PROMPTS} answers equal PEFT's, log probabilities within {apart:.1e}; "
            f"merged {sum(tokens == one for (tokens, _), one in zip(beside, merged, strict=True))}; "
            f"{changed} differ from the model's alone",
            flush=True,
        )
        wrong += equal.count(False)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="only these")
    models = parser.parse_args().model or [*MODELS]
    print(f"PEFT {peft.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        wrong = sum(compare(name, Path(folder) / name) for name in models)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
