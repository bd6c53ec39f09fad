"""Every kind of model in every layout that divides requests or tokens, over the real library of grammars: small models
with the embedded one's tokenizer. Answers are those of one process: with common prefixes, prompts in chunks beside
decoding, grammars, penalties, seeds, stops, a pool that is too small for all, and draft tokens."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_servers import forked_children
from matrix import KINDS, cells, flags_of, kinds
from srt.models.harness import save_tiny

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH

pytestmark = pytest.mark.thorough

TOKENIZER = {"vocab_size": 4096, "eos_token_id": 4076, "pad_token_id": 4074}
NAMES = kinds("plain, one KV head")
TRIED = ("DP2", "DP2 x EP2", "DP4", "DCP2", "DCP4", "TP4 x DCP2")
REPLICAS = "two replicas"
CELLS = [*cells(NAMES, TRIED), *((REPLICAS, name) for name in NAMES)]
POOL, CHUNK, PAGE = 192, 16, 4
TRUNK = "Once upon a time a small model was asked the same question twice, and answered. "
PROMPTS = [
    TRUNK + "Yes?",
    TRUNK + "No?",
    "Ask!",
    "A JSON object, please: ",
    TRUNK,
    "7 + 4 =",
    TRUNK + "Yes?",
    "b c d e",
]
GREEDY = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
REGEX = "(yes|no), [0-9]{3}"
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 20, "regex": REGEX},
    GREEDY,
    {**GREEDY, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "max_new_tokens": 24, "json_schema": SCHEMA, "frequency_penalty": 0.5},
    {**GREEDY, "temperature": 0.9, "sampling_seed": 7},
    {"temperature": 0.8, "sampling_seed": 9, "max_new_tokens": 20, "regex": REGEX},
    {**GREEDY, "stop": ["e"], "logit_bias": {"11": 1.0}},
    {**GREEDY, "min_new_tokens": 4},
]
Answers = list[tuple[list[int], str]]
"""Tokens, and why they end."""


def answers(folder: Path, **flags: Any) -> Answers:
    """Twice, the second time from the cache. pool and chunk: of a group of the ranks."""
    groups = flags.get("attn_dp_size", 1)
    with forked_children(), sglang.Engine(
        model_path=str(folder), device="cpu", dtype="float32", random_seed=0, max_total_tokens=POOL, page_size=PAGE,
        max_running_requests=4 * groups, chunked_prefill_size=CHUNK * groups, schedule_conservativeness=0.01, **flags,
    ) as engine:  # fmt: skip
        first, again = (engine.generate(PROMPTS, PARAMS) for _ in range(2))
        for state in engine.get_server_info()["internal_states"]:
            memory = state["memory_usage"]
            assert memory["free"] + memory["cached"] == memory["total"]
    assert sum(answer["meta_info"]["cached_tokens"] for answer in again) > 0
    for answer, params in zip(first + again, PARAMS * 2, strict=True):
        if "regex" in params:
            assert re.fullmatch(REGEX, answer["text"])
    found = [
        [(each["output_ids"], each["meta_info"]["finish_reason"]["type"]) for each in part] for part in (first, again)
    ]
    assert found[0] == found[1]
    return found[0]


@pytest.fixture(scope="module")
def kind_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Answers]]:
    """Where a model of a kind is, and what one process answers."""

    @functools.cache
    def saved(kind: str) -> tuple[Path, Answers]:
        folder = tmp_path_factory.mktemp("model")
        save_tiny(KINDS[kind].tiny, folder, **TOKENIZER, **KINDS[kind].changes, **KINDS[kind].at_four)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(DEFAULT_MODEL_PATH) / file, folder / file)
        return folder, answers(folder)

    return saved


@pytest.mark.parametrize("draft_tokens", [False, True], ids=["", "NGRAM"])
@pytest.mark.parametrize(("layout", "kind"), CELLS)
def test_a_kind_answers_as_one_process(
    layout: str, kind: str, draft_tokens: bool, kind_of: Callable[[str], tuple[Path, Answers]]
) -> None:
    folder, expected = kind_of(kind)
    flags = {"dp_size": 2} if layout == REPLICAS else flags_of(layout)
    assert answers(folder, **flags, **({"speculative_algorithm": "NGRAM"} if draft_tokens else {})) == expected
