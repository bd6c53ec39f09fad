"""SmolLM2-135M-Instruct, a real model in GGUF that comes as a package: it answers with the tokens of transformers, also
with drafts, grammars, penalties, tiers of the prefix cache, and on several ranks. `make quality` runs this, on a GPU
with ARGS="--device cuda".

In float32 all tokens are equal. In bfloat16 two kernels round differently, so that of two tokens that are nearly as
likely either may come. Where answers part, the scores of both tokens (after penalties, with the noise of sampling) have
to be less than `NEAR` apart, and half of the answers must not part.

The model has nine heads over three KV heads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from sglang.srt.sampling.noise import gumbel_noise

pytestmark = [pytest.mark.quality, pytest.mark.timeout(1200)]

TOKENS = 24
NEAR = 0.25
"""Logits reach 20 and have eight bits: four steps of rounding."""
END = 2
"""The token that ends an answer."""
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
Answers = Mapping[str, list[list[int]]]
Requests = Mapping[str, tuple[list[str], dict[str, Any]]]
REQUESTS: Requests = {
    "greedy": (PROMPTS, GREEDY),
    "penalties": (PROMPTS[:3], {**GREEDY, "frequency_penalty": 0.7, "presence_penalty": 0.3}),
    "sampled": (PROMPTS[:3], {**GREEDY, "temperature": 0.8, "sampling_seed": 7}),
    "a schema": ([asked("Name a large city as JSON.")], {**GREEDY, "ignore_eos": False, "json_schema": SCHEMA}),
    "a pattern": ([asked("When did it happen?")], {**GREEDY, "ignore_eos": False, "regex": r"\d{4}-\d{2}-\d{2}"}),
    "a prefix twice": ([PROMPTS[-1] + more for more in (" is", " was", " is")], GREEDY),
}
OF_EQUAL_TOKENS: Requests = {
    "repetition": (PROMPTS[:3], {**GREEDY, "frequency_penalty": 0.7, "repetition_penalty": 1.2}),
    "most likely": (PROMPTS[:3], {**GREEDY, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 7}),
}
"""Scores of two tokens do not follow from their log probabilities alone."""


@dataclass(frozen=True)
class Place:
    """Where the model is, and how it is served."""

    model: str
    device: str
    dtype: str

    @property
    def requests(self) -> Requests:
        return {**REQUESTS, **(OF_EQUAL_TOKENS if self.dtype == "float32" else {})}

    def started(self, **flags: Any) -> sglang.Engine:
        common: dict[str, Any] = {"model_path": self.model, "dtype": self.dtype, "device": self.device}
        common["max_total_tokens"] = 12288
        if self.device == "cuda":
            common["cuda_graph_max_bs"] = 8
        with forked_children() if self.device == "cpu" else nullcontext():
            return sglang.Engine(**{**common, **flags})

    def answers(self, engine: sglang.Engine) -> dict[str, list[list[int]]]:
        result = {}
        for name, (prompts, params) in self.requests.items():
            outputs = engine.generate(prompts, params)
            assert isinstance(outputs, list)
            result[name] = [output["output_ids"] for output in outputs]
        return result

    def check_same(self, engine: sglang.Engine, got: Mapping[str, list[list[int]]], plain: Answers) -> None:
        """engine: that of the plain run, which says how likely two tokens are."""
        assert engine.tokenizer is not None
        gaps = {}
        for name, (prompts, params) in self.requests.items():
            for number, (prompt, ours, want) in enumerate(zip(prompts, got[name], plain[name], strict=True)):
                if ours != want:
                    assert self.dtype != "float32", (name, prompt, ours, want)
                    ids = engine.tokenizer.encode(prompt)
                    gaps[name, number] = gap_where_they_part(engine, ids, ours, want, params)
        assert all(abs(gap) < NEAR for gap in gaps.values()), gaps
        assert 2 * len(gaps) <= sum(map(len, plain.values())), gaps


def gap_where_they_part(
    engine: sglang.Engine, ids: list[int], ours: list[int], want: list[int], params: Mapping[str, Any]
) -> float:
    """How much higher the score of the wanted token is than that of ours, where the answers part."""
    ours, want = [*ours, END], [*want, END]
    first = next(i for i, (a, b) in enumerate(zip(ours, want, strict=False)) if a != b)
    of_want, of_ours = scores(engine, ids, want[:first], [want[first], ours[first]], params)
    return of_want - of_ours


def scores(
    engine: sglang.Engine, ids: list[int], before: list[int], tokens: list[int], params: Mapping[str, Any]
) -> list[float]:
    """By which the sampler chooses among tokens behind a prompt and the first ones of its answer."""
    output = engine.generate(
        input_ids=ids + before, sampling_params={"max_new_tokens": 1}, return_logprob=True, token_ids_logprob=tokens
    )
    assert isinstance(output, dict)
    (entries,) = output["meta_info"]["output_token_ids_logprobs"]
    logprobs = {token: logprob for logprob, token, _ in entries}
    return [score(logprobs[token], token, before, len(ids) + len(before), params) for token in tokens]


def score(logprob: float, token: int, before: Sequence[int], position: int, params: Mapping[str, Any]) -> float:
    """The score of a token behind `before`; position: the tokens before it."""
    count = before.count(token)
    value = logprob - params.get("frequency_penalty", 0.0) * count - params.get("presence_penalty", 0.0) * (count > 0)
    if not params["temperature"]:
        return value
    seed, zero = (torch.tensor([number]) for number in (params["sampling_seed"], 0))
    noise = gumbel_noise(seed, zero, torch.tensor([position]), token + 1)
    return value / params["temperature"] + noise[0, token].item()


@pytest.fixture(scope="module")
def place(pytestconfig: pytest.Config) -> Place:
    device = pytestconfig.getoption("--device", "cpu")
    dtype = pytestconfig.getoption("--dtype", None) or ("float32" if device == "cpu" else "bfloat16")
    return Place(pytestconfig.getoption("--smollm2", "smollm2"), device, dtype)


@pytest.fixture(scope="module")
def engine(place: Place) -> Iterator[sglang.Engine]:
    with place.started() as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(place: Place, engine: sglang.Engine) -> Answers:
    return place.answers(engine)


def test_tokens_are_those_of_transformers(place: Place, engine: sglang.Engine, plain: Answers) -> None:
    """Of its own conversion of the file, in float32. Each token is the likeliest behind those before it, in one pass;
    in bfloat16 it is nearly as likely."""
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    (file,) = resolve_model_path(place.model).glob("*.gguf")
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
        if place.dtype == "float32":
            assert logits.argmax(-1).tolist() == output, prompt
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < NEAR, prompt


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


def test_eight_thousand_tokens_are_read_in_chunks_as_at_once(place: Place, engine: sglang.Engine) -> None:
    assert engine.tokenizer is not None
    ids = (engine.tokenizer.encode(ARTICLE) * 4)[:8000]
    params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    whole = engine.generate(input_ids=ids, sampling_params=params)
    with place.started(chunked_prefill_size=512) as in_chunks:
        parts = in_chunks.generate(input_ids=ids, sampling_params=params)
    assert isinstance(whole, dict) and isinstance(parts, dict)
    if parts["output_ids"] != whole["output_ids"]:
        assert place.dtype != "float32"
        assert abs(gap_where_they_part(engine, ids, parts["output_ids"], whole["output_ids"], params)) < NEAR


def first_layers(model: str, folder: Path, count: int) -> Path:
    """The model cut to its first layers, as a checkpoint of safetensors."""
    source = resolve_model_path(model)
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
def test_tokens_are_those_of_the_plain_run(
    case: str, place: Place, engine: sglang.Engine, plain: Answers, tmp_path: Path
) -> None:
    flags = dict(FLAGS[case])
    if case == "STANDALONE":
        flags["speculative_draft_model_path"] = str(first_layers(place.model, tmp_path / "draft", 6))
    with place.started(**flags) as other:
        got = place.answers(other)
    place.check_same(engine, got, plain)


@pytest.mark.parametrize("name", ["greedy", "penalties", "sampled"])
def test_scores_are_those_by_which_the_sampler_chooses(
    name: str, place: Place, engine: sglang.Engine, plain: Answers
) -> None:
    """Otherwise two tokens that are far apart could seem near: no token has a higher score than that of the answer."""
    assert engine.tokenizer is not None
    prompts, params = place.requests[name]
    ids, output = engine.tokenizer.encode(prompts[0]), plain[name][0]
    likely = sorted({*output, *plain["greedy"][0], *range(1000)})
    for length in (0, TOKENS // 2, TOKENS - 1):
        found = dict(zip(likely, scores(engine, ids, output[:length], likely, params), strict=True))
        highest = max(found, key=found.__getitem__)
        assert highest == output[length] or found[highest] - found[output[length]] < NEAR, (length, highest)
        assert place.dtype != "float32" or highest == output[length]
