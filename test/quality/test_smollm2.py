"""SmolLM2-135M-Instruct, a real model in GGUF that comes as a package: it answers with the tokens of transformers, also
with drafts, grammars, penalties, tiers of the prefix cache, and on several ranks. `make quality` runs this.

The model has nine heads over three KV heads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_servers import forked_children
from safetensors.torch import save_file

import sglang
from sglang.srt.configs.hf_config import read_config
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.model_loader.checkpoint import find_checkpoint

pytestmark = [pytest.mark.quality, pytest.mark.timeout(1200)]

TOKENS = 24
ARTICLE = (Path(__file__).parents[2] / "LICENSE").read_text()
"""English of some thousand tokens."""
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
        "required": ["city", "population"],
    }
)


def asked(question: str) -> str:
    """The prompt of the model's chat template."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    asked("What is the capital of France?"),
    asked("List three colours."),
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    f"{ARTICLE[:4000]}\n\nIn summary, this license",
]
GREEDY = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
REQUESTS: Mapping[str, tuple[list[str], dict[str, Any]]] = {
    "greedy": (PROMPTS, GREEDY),
    "penalties": (PROMPTS[:3], {**GREEDY, "frequency_penalty": 0.7, "repetition_penalty": 1.2}),
    "sampled": (PROMPTS[:3], {**GREEDY, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 7}),
    "a schema": ([asked("Name a large city as JSON.")], {**GREEDY, "ignore_eos": False, "json_schema": SCHEMA}),
    "a pattern": ([asked("When did it happen?")], {**GREEDY, "ignore_eos": False, "regex": r"\d{4}-\d{2}-\d{2}"}),
    "a prefix twice": ([PROMPTS[-1] + more for more in (" is", " was", " is")], GREEDY),
}


def started(**flags: Any) -> sglang.Engine:
    with forked_children():
        return sglang.Engine(
            **{"model_path": "smollm2", "dtype": "float32", "device": "cpu", "max_total_tokens": 12288, **flags}
        )


def answers(engine: sglang.Engine) -> dict[str, list[list[int]]]:
    result = {}
    for name, (prompts, params) in REQUESTS.items():
        outputs = engine.generate(prompts, params)
        assert isinstance(outputs, list)
        result[name] = [output["output_ids"] for output in outputs]
    return result


@pytest.fixture(scope="module")
def engine() -> Iterator[sglang.Engine]:
    with started() as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: sglang.Engine) -> dict[str, list[list[int]]]:
    return answers(engine)


def test_tokens_are_those_of_transformers(engine: sglang.Engine, plain: dict[str, list[list[int]]]) -> None:
    """Of its own conversion of the file. Each token is the likeliest behind those before it, in one pass."""
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    (file,) = resolve_model_path("smollm2").glob("*.gguf")
    with torch.device("meta"):
        config = load_gguf_checkpoint(str(file))["config"]
    model = LlamaForCausalLM(LlamaForCausalLM.config_class(**config)).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is the embedding
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert engine.tokenizer is not None
    for prompt, output in zip(PROMPTS, plain["greedy"], strict=True):
        ids = engine.tokenizer.encode(prompt)
        assert ids == tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == output, prompt


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the opposite of hot?", "cold"),
        ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ],
)
def test_answers_are_sensible(engine: sglang.Engine, question: str, word: str) -> None:
    output = engine.generate(asked(question), {"temperature": 0.0, "max_new_tokens": 64})
    assert isinstance(output, dict)
    assert word.lower() in output["text"].lower()


def test_eight_thousand_tokens_are_read_in_chunks_as_at_once(engine: sglang.Engine) -> None:
    assert engine.tokenizer is not None
    ids = (engine.tokenizer.encode(ARTICLE) * 4)[:8000]
    params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    whole = engine.generate(input_ids=ids, sampling_params=params)
    with started(chunked_prefill_size=512) as in_chunks:
        parts = in_chunks.generate(input_ids=ids, sampling_params=params)
    assert isinstance(whole, dict) and isinstance(parts, dict)
    assert parts["output_ids"] == whole["output_ids"]


def first_layers(folder: Path, count: int) -> Path:
    """The model cut to its first layers, as a checkpoint of safetensors."""
    source = resolve_model_path("smollm2")
    config = {**read_config(source), "num_hidden_layers": count, "torch_dtype": "float32"}
    names = {f"model.layers.{i}." for i in range(count)}
    tensors = {
        name: opened.get_tensor(name)
        for name, _, opened in find_checkpoint(str(source)).tensors()
        if ".layers." not in name or any(name.startswith(layer) for layer in names)
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder


FLAGS: Mapping[str, dict[str, Any]] = {
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "speculative_num_steps": 3},
    "main memory": {"enable_hierarchical_cache": True, "hicache_size": 0.5, "max_total_tokens": 2048},
    "no prefix cache": {"disable_radix_cache": True},
    "tp 2": {"tp_size": 2},
    "pp 2": {"pp_size": 2},
    "tp 2, NGRAM": {"tp_size": 2, "speculative_algorithm": "NGRAM"},
}


@pytest.mark.parametrize("case", FLAGS)
def test_tokens_are_those_of_the_plain_run(case: str, plain: dict[str, list[list[int]]], tmp_path: Path) -> None:
    flags = dict(FLAGS[case])
    if case == "STANDALONE":
        flags["speculative_draft_model_path"] = str(first_layers(tmp_path / "draft", 6))
    with started(**flags) as engine:
        got = answers(engine)
    for name, want in plain.items():
        assert got[name] == want, name
