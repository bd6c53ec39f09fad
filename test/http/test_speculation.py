"""A server that drafts with n-grams beside one that does not: the same answers, and what it says of its drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import live_server
from srt.models import test_dspark_drafts as dspark_drafts
from srt.models.test_eagle3_drafts import save

from sglang.embedded import DEFAULT_MODEL_PATH

PROMPT = "Question: Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?\nAnswer:"
SEEDED = {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"apples": {"type": "integer"}, "names": {"type": "array", "items": {"type": "string"}}},
    "required": ["apples", "names"],
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SEEDED,
    "several": {**SEEDED, "n": 3},
    "stop string": {"stop": ["####"]},
    "stop token": {"stop_token_ids": [46]},
    "penalties": {**SEEDED, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "least length": {"min_new_tokens": 30, "ignore_eos": False},
    "regex": {**SEEDED, "regex": r"( apple| pear|, ){3,9}\."},
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "bias": {**SEEDED, "logit_bias": {"46": -100.0}},
    "one token": {"max_new_tokens": 1},
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    texts = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    texts.write_text('"the quick brown fox jumps over the lazy dog"\n')
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-external-corpus-max-tokens", "2000"]
    flags += ["--speculative-ngram-external-corpus-path", str(texts), "--enable-metrics", "--served-model-name", "tiny"]
    flags += ["--decode-log-interval", "1"]
    with live_server(*flags) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        yield client
        log = server.log()
        assert "Traceback" not in log and ", accept len: " in log


def generate(client: httpx.Client, params: dict[str, Any], **body: Any) -> Any:
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, **params}
    response = client.post("/generate", json={"text": PROMPT, "sampling_params": params, **body})
    assert response.status_code == 200, response.text
    return response.json()


def as_list(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


@pytest.mark.parametrize("name", CALLS)
def test_the_same_tokens(http: httpx.Client, drafting: httpx.Client, name: str) -> None:
    plain, drafted = (as_list(generate(client, CALLS[name])) for client in (http, drafting))
    for without, with_drafts in zip(plain, drafted, strict=True):
        assert with_drafts["output_ids"] == without["output_ids"]
        assert with_drafts["text"] == without["text"]
        finish = [answer["meta_info"]["finish_reason"] for answer in (without, with_drafts)]
        assert finish[0] == finish[1]


def test_the_same_log_probabilities(http: httpx.Client, drafting: httpx.Client) -> None:
    """Up to rounding: steps of other sizes add up in another order."""
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    plain, drafted = (generate(client, SEEDED, **wanted)["meta_info"] for client in (http, drafting))
    for field in ("output_token_logprobs", "input_token_logprobs"):
        assert len(plain[field]) == len(drafted[field])
        for (expected, token, _), (actual, drafted_token, _) in zip(plain[field], drafted[field], strict=True):
            assert token == drafted_token and actual == pytest.approx(expected, abs=1e-4)
    for expected, actual in zip(plain["output_top_logprobs"], drafted["output_top_logprobs"], strict=True):
        assert [entry[1] for entry in expected] == [entry[1] for entry in actual]


def test_streams_join_to_the_answer(drafting: httpx.Client) -> None:
    whole = generate(drafting, SEEDED)
    params = {"max_new_tokens": 40, "ignore_eos": True, **SEEDED}
    body = {"text": PROMPT, "sampling_params": params, "stream": True}
    with drafting.stream("POST", "/generate", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    last = json.loads(lines[-2])
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    counts = [json.loads(line)["meta_info"].get("spec_verify_ct", 0) for line in lines[:-1]]
    assert counts == sorted(counts) and counts[-1] == last["meta_info"]["spec_verify_ct"] > 0


def test_a_batch(http: httpx.Client, drafting: httpx.Client) -> None:
    """Requests of different lengths beside one another, with prompts that come while others decode."""
    body = {
        "text": [PROMPT[: 20 * i + 8] for i in range(6)],
        "sampling_params": [{"max_new_tokens": 10 + 12 * i, "ignore_eos": True, **SEEDED} for i in range(6)],
    }
    plain, drafted = (client.post("/generate", json=body).json() for client in (http, drafting))
    assert [answer["output_ids"] for answer in drafted] == [answer["output_ids"] for answer in plain]


def test_replies_say_how_drafts_fared(http: httpx.Client, drafting: httpx.Client) -> None:
    info = generate(drafting, {})["meta_info"]
    assert 1 < info["spec_accept_length"] <= 8 and 0 < info["spec_accept_rate"] <= 1
    assert info["spec_accept_length"] == pytest.approx(1 + info["spec_num_correct_drafts"] / info["spec_verify_ct"])
    histogram = info["spec_correct_drafts_histogram"]
    assert sum(histogram) == info["spec_verify_ct"]
    assert sum(i * count for i, count in enumerate(histogram)) == info["spec_num_correct_drafts"]
    assert not [name for name in generate(http, {})["meta_info"] if name.startswith("spec")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_forms(http: httpx.Client, drafting: httpx.Client, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = {**prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_spec_tokens_details": True}
    plain, drafted = (client.post(path, json=body).json() for client in (http, drafting))
    assert drafted["choices"] == plain["choices"]
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 40
    assert plain["sglext"] == {"spec_tokens_details": None}
    details = drafted["sglext"]["spec_tokens_details"]
    assert details["spec_verify_ct"] > 0 and set(details) == {
        "spec_accept_length", "spec_accept_rate", "spec_num_correct_drafts", "spec_num_proposed_drafts",
        "spec_verify_ct", "spec_correct_drafts_histogram",
    }  # fmt: skip
    several = drafting.post(path, json={**body, "n": 2}).json()["sglext"]["spec_tokens_details"]
    assert len(several) == 2 and all(details["spec_verify_ct"] > 0 for details in several)
    assert "sglext" not in drafting.post(path, json={**body, "return_spec_tokens_details": False}).json()
    with drafting.stream("POST", path, json={**body, "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    last = json.loads(events[-2])
    assert events[-1] == "[DONE]" and last["choices"] == [] and last["usage"] is None
    assert last["sglext"]["spec_tokens_details"] == details
    assert not [event for event in events[:-2] if "sglext" in event]


def test_the_server_says_how_drafts_fare(drafting: httpx.Client) -> None:
    before = metrics(drafting)["spec_verify_calls_total"]
    verified = generate(drafting, {})["meta_info"]["spec_verify_ct"]
    generate(drafting, {})  # so that a second snapshot may come
    (state,) = drafting.get("/server_info").json()["internal_states"]
    assert 1 < state["avg_spec_accept_length"] <= 8
    assert state["spec_totals"]["requests"] >= 2 * verified
    after = metrics(drafting)
    assert after["spec_verify_calls_total"] >= before and after["spec_num_draft_tokens"] in range(1, 9)
    assert {"spec_accept_length", "spec_accept_rate", "spec_num_steps"} <= after.keys()


def metrics(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.split("{")[0].removeprefix("sglang:"): float(line.split()[-1]) for line in lines}


def test_external_texts(http: httpx.Client, drafting: httpx.Client) -> None:
    """Guesses from texts that hold the answer are right, until these are removed."""
    (first,) = drafting.get("/list_external_corpora").json()["corpus_token_counts"].items()
    assert first[0] == "texts.jsonl" and first[1] > 5
    params = {"max_new_tokens": 60, **SEEDED, "sampling_seed": 11}
    answer = generate(drafting, params)
    added = drafting.post("/add_external_corpus", json={"corpus_id": "a", "documents": [PROMPT + answer["text"]]})
    assert added.json() == {
        "success": True,
        "corpus_id": "a",
        "message": f"Loaded corpus 'a' with {added.json()['loaded_token_count']} tokens.",
        "loaded_token_count": added.json()["loaded_token_count"],
    }
    assert added.json()["loaded_token_count"] >= 60
    helped = generate(drafting, params)
    assert helped["output_ids"] == answer["output_ids"] == generate(http, params)["output_ids"]
    assert helped["meta_info"]["spec_accept_length"] > answer["meta_info"]["spec_accept_length"] + 1
    assert drafting.post("/remove_external_corpus", json={"corpus_id": "a"}).json()["success"]
    again = generate(drafting, params)["meta_info"]["spec_accept_length"]
    assert again == answer["meta_info"]["spec_accept_length"]
    assert drafting.get("/list_external_corpora").json()["corpus_token_counts"] == dict([first])


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/add_external_corpus", {"documents": ["x " * 3000]}, "--speculative-ngram-external-corpus-max-tokens 2000"),
        ("/add_external_corpus", {"documents": []}, "documents must be a list of texts"),
        ("/add_external_corpus", {"corpus_id": "texts.jsonl", "documents": ["x"]}, "already"),
        ("/add_external_corpus", {"file_path": "/etc/passwd"}, "file_path is not read for clients"),
        ("/add_external_corpus", {"documents": [1]}, "documents"),
        ("/remove_external_corpus", {"corpus_id": "none"}, "there is no corpus 'none'"),
        ("/remove_external_corpus", {}, "corpus_id"),
    ],
)
def test_refused_texts(drafting: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    answer = drafting.post(path, json=body)
    assert answer.status_code == 400 and message in answer.text


@pytest.mark.parametrize("path", ["/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"])
def test_texts_are_for_ngram_drafts(http: httpx.Client, path: str) -> None:
    answer = http.get(path) if "list" in path else http.post(path, json={"documents": ["x"], "corpus_id": "x"})
    assert answer.status_code == 400 and "--speculative-algorithm NGRAM" in answer.text


SHIPPED = Path(DEFAULT_MODEL_PATH).parent
DRAFTERS = ("NEXTN", "EAGLE3", "STANDALONE", "DFLASH", "DSPARK")


def draft_flags(drafter: str, folder: Path) -> list[str]:
    """Drafts that are shipped with the embedded model; it itself as a small model; a block draft of random weights."""
    if drafter == "NEXTN":
        return []
    shipped = {"STANDALONE": DEFAULT_MODEL_PATH, "EAGLE3": SHIPPED / "eagle3", "DFLASH": SHIPPED / "dflash"}
    path = shipped.get(drafter)
    if path is None:
        sizes = {"hidden_size": 256, "vocab_size": 4096, "head_dim": 64, "intermediate_size": 128}
        config = dspark_drafts.CONFIG | sizes | {"target_layer_ids": [1, 4], "markov_head_type": "rnn"}
        path = save(folder / "draft", config, dspark_drafts.weights(config))
    return ["--speculative-draft-model-path", str(path)]


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_gives_the_same_tokens(http: httpx.Client, drafter: str, tmp_path: Path) -> None:
    """With grammars, penalties, several answers, stop strings: what a server without drafts answers."""
    flags = ["--speculative-algorithm", drafter, *draft_flags(drafter, tmp_path)]
    with live_server(*flags) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        for name, params in CALLS.items():
            plain, drafted = (as_list(generate(each, params)) for each in (http, client))
            for without, with_drafts in zip(plain, drafted, strict=True):
                assert with_drafts["output_ids"] == without["output_ids"], name
                info, expected = with_drafts["meta_info"], without["meta_info"]
                assert info["finish_reason"] == expected["finish_reason"], name
                assert name == "one token" or info["spec_verify_ct"] > 0, name
        assert "Traceback" not in server.log()
