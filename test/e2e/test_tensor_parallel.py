"""Two scheduler processes behind one engine: every rank takes the same decisions, and the answers are those of one."""

from __future__ import annotations

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH

PROMPTS = ["The capital of France is", "One, two, three,", "Dear reader"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 7}
GRAMMAR = {"temperature": 0.0, "max_new_tokens": 8, "regex": "(yes|no)"}


def answers(tp_size: int) -> list[object]:
    with sglang.Engine(model_path=DEFAULT_MODEL_PATH, max_total_tokens=4096, tp_size=tp_size) as engine:
        results = [engine.generate(PROMPTS, params) for params in (GREEDY, SEEDED, GREEDY)]
        results.append(engine.generate(PROMPTS[:1], GRAMMAR))
        (state,) = engine.get_server_info()["internal_states"]
        memory = state["memory_usage"]
        assert memory["free"] + memory["cached"] == memory["total"]
    return [[answer["output_ids"] for answer in result] for result in results]


def test_two_ranks_answer_like_one() -> None:
    assert answers(2) == answers(1)
