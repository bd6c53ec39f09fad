"""Several scheduler processes behind one engine: they take the same decisions, and the answers are those of one."""

from __future__ import annotations

import functools

import pytest
from forked_servers import forked_children

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH, DFLASH_PATH, EAGLE3_PATH
from sglang.srt.managers.front.generate_request import RequestError

PROMPTS = ["The capital of France is", "One, two, three,", "Dear reader"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 7}
PENALIZED = {**GREEDY, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
GRAMMAR = {"temperature": 0.0, "max_new_tokens": 8, "regex": "(yes|no)"}
STOPPED = [
    {**GREEDY, "max_new_tokens": 200, "stop_regex": "[a-z]{4} "},
    {**GREEDY, "max_new_tokens": 200, "stop": ["e"]},
    GREEDY,
]
"""What the leader decides and what every rank decides, in one batch."""
DRAFTS = {"EAGLE3": EAGLE3_PATH, "DFLASH": DFLASH_PATH}
REFUSED = [{**GREEDY, "regex": "("}, {**GREEDY, "json_schema": '{"$ref": "#"}'}]


@functools.cache
def answers(
    tp_size: int,
    ep_size: int = 1,
    pp_size: int = 1,
    dcp_size: int = 1,
    attn_dp_size: int = 1,
    own_heads: bool = False,
    drafter: str | None = None,
) -> list[object]:
    """drafter: of the embedded model."""
    with (
        forked_children(),
        sglang.Engine(
            model_path=DEFAULT_MODEL_PATH,
            max_total_tokens=4096,
            chunked_prefill_size=4,
            tp_size=tp_size,
            ep_size=ep_size,
            pp_size=pp_size,
            dcp_size=dcp_size,
            attn_dp_size=attn_dp_size,
            enable_dp_lm_head=own_heads,
            enable_return_hidden_states=True,
            speculative_algorithm=drafter,
            speculative_draft_model_path=DRAFTS.get(drafter or ""),
        ) as engine,
    ):
        results = [engine.generate(PROMPTS, params) for params in (GREEDY, SEEDED, GREEDY, PENALIZED)]
        results.append(engine.generate(PROMPTS[:1], GRAMMAR))
        results.append(engine.generate(PROMPTS, STOPPED))
        for params in REFUSED:
            with pytest.raises(RequestError, match="invalid regex|No text satisfies|Circular"):
                engine.generate(PROMPTS[0], params)
        (state,) = engine.get_server_info()["internal_states"]
        memory = state["memory_usage"]
        assert memory["free"] + memory["cached"] == memory["total"]
        scored = engine.generate(PROMPTS[:1], GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
        logprobs = [scored[0]["meta_info"][f"{part}_token_logprobs"] for part in ("input", "output")]
        seen = engine.generate(PROMPTS[0], GREEDY, return_hidden_states=True)["meta_info"]["hidden_states"]
        states = [round(float(value), 3) + 0.0 for rows in seen for value in rows.reshape(-1)[:2]]
    tokens = [[answer["output_ids"] for answer in result] for result in results]
    return [*tokens, [[None if p is None else round(p, 3) for p, *_ in part] for part in logprobs], states]


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", [None, "NGRAM", "EAGLE3"])
def test_ranks_that_share_out_tokens_answer_like_one(drafter: str | None) -> None:
    assert answers(4, dcp_size=2, drafter=drafter) == answers(1)


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "pp_size", "groups", "own_heads"),
    [
        (2, 2, 1, 2, False),
        pytest.param(4, 1, 1, 2, False, marks=pytest.mark.thorough),
        pytest.param(4, 1, 1, 2, True, marks=pytest.mark.thorough),
        pytest.param(4, 4, 1, 4, True, marks=pytest.mark.thorough),
        pytest.param(2, 1, 2, 2, False, marks=pytest.mark.thorough),
        pytest.param(2, 2, 2, 2, True, marks=pytest.mark.thorough),
    ],
)
def test_groups_with_requests_of_their_own_answer_like_one(
    tp_size: int, ep_size: int, pp_size: int, groups: int, own_heads: bool
) -> None:
    assert answers(tp_size, ep_size, pp_size, attn_dp_size=groups, own_heads=own_heads) == answers(1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tp_size", "pp_size", "drafter"), [(2, 1, "NGRAM"), (2, 1, "EAGLE3"), (4, 1, "DFLASH"), (2, 2, "EAGLE3")]
)
def test_groups_that_draft_answer_like_one_without_drafts(tp_size: int, pp_size: int, drafter: str) -> None:
    """With grammars, stops, penalties, log probabilities and hidden states."""
    assert answers(tp_size, pp_size=pp_size, attn_dp_size=2, drafter=drafter) == answers(1)


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "pp_size"), [pytest.param(2, 1, 1, marks=pytest.mark.thorough), (2, 2, 1), (1, 1, 2)]
)
def test_ranks_answer_like_one(tp_size: int, ep_size: int, pp_size: int) -> None:
    assert answers(tp_size, ep_size, pp_size) == answers(1)
