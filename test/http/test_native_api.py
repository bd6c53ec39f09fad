"""`/generate` and the routes that look after the server."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from live_server import LiveServer

from sglang.version import __version__

PROMPT = "Question: Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?\nAnswer:"
"""The embedded model writes its sums in two dozen tokens: more than any test asks for."""


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/update_weights_from_ipc", "/update_weights_from_disk"),
    ],
)
def test_what_is_not_there_says_what_to_do_instead(http: httpx.Client, path: str, instead: str) -> None:
    answer = http.post(path, json={"model_path": "x", "lora_name": "x", "lora_path": "y"})
    said = answer.json()
    assert answer.status_code == 400 and said["success"] is False
    assert f"{path} is not implemented" in said["message"] and instead in said["error"]["message"]
    assert path not in http.get("/openapi.json").json()["paths"]


def url_of(http: httpx.Client) -> str:
    return str(http.base_url).rstrip("/")


def generate(http: httpx.Client, **body: Any) -> Any:
    params = {"max_new_tokens": 6, "temperature": 0, **body.pop("sampling_params", {})}
    response = http.post("/generate", json={"text": PROMPT, "sampling_params": params, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, **body: Any) -> list[Any]:
    params = {"max_new_tokens": 6, "temperature": 0, **body.pop("sampling_params", {})}
    body = {"text": PROMPT, "stream": True, "sampling_params": params, **body}
    with http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate(http: httpx.Client) -> None:
    result = generate(http, rid="my-own-id")
    info = result["meta_info"]
    assert result["text"] and len(result["output_ids"]) == 6
    assert info["id"] == "my-own-id" and info["finish_reason"] == {"type": "length", "length": 6}
    assert info["completion_tokens"] == 6 and info["prompt_tokens"] > 0 and info["cached_tokens"] >= 0
    assert info["e2e_latency"] > 0
    assert (info["weight_version"], info["num_retractions"], info["reasoning_tokens"]) == ("default", 0, 0)
    assert http.put("/generate", json={"text": PROMPT, "sampling_params": {"max_new_tokens": 1}}).status_code == 200


def test_generate_stream_is_cumulative(http: httpx.Client) -> None:
    whole = generate(http)
    seen = events(http)
    assert seen[-1]["text"] == whole["text"] and seen[-1]["output_ids"] == whole["output_ids"]
    for earlier, later in pairwise(seen):
        assert later["text"].startswith(earlier["text"]) and earlier["meta_info"]["finish_reason"] is None


def test_batches(http: httpx.Client) -> None:
    prompts = [PROMPT, "Another one"]
    results = generate(http, text=prompts)
    assert [result["text"] for result in results] == [generate(http, text=prompt)["text"] for prompt in prompts]
    ids = http.post("/tokenize", json={"prompt": prompts}).json()["tokens"]
    by_ids = generate(http, text=None, input_ids=ids)
    assert [result["output_ids"] for result in by_ids] == [result["output_ids"] for result in results]
    streamed = events(http, text=prompts)
    last = {event["index"]: event["text"] for event in streamed}
    assert last == dict(enumerate(result["text"] for result in results))
    assert len(generate(http, sampling_params={"n": 3})) == 3


def test_generate_logprobs(http: httpx.Client) -> None:
    info = generate(http, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True)[
        "meta_info"
    ]
    assert len(info["output_token_logprobs"]) == len(info["output_top_logprobs"]) == 6
    assert len(info["input_token_logprobs"]) == info["prompt_tokens"]
    assert "".join(text for _, _, text in info["input_token_logprobs"]) == PROMPT
    assert info["input_token_logprobs"][0][0] is None
    for (logprob, token, _), top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True):
        assert len(top) == 2 and top[0][:2] == [logprob, token]


def test_information(http: httpx.Client) -> None:
    assert http.get("/model_info").json() == http.get("/get_model_info").json()
    model = http.get("/model_info").json()
    assert model["is_generation"] is True and model["architectures"] == ["Qwen3MoeForCausalLM"]
    info = http.get("/server_info").json()
    assert info["served_model_name"] == "tiny" and info["version"] == __version__ and info["max_total_num_tokens"] > 0
    assert {"last_gen_throughput", "memory_usage"} <= info["internal_states"][0].keys()
    assert http.get("/get_server_info").status_code == 200
    load = http.get("/v1/loads").json()["loads"][0]
    assert load["num_running_reqs"] == load["num_queue_reqs"] == load["num_used_tokens"] == 0
    assert load["max_total_num_tokens"] > 4096 and load["num_waiting_reqs"] == load["token_usage"] == 0
    aggregate = http.get("/v1/loads").json()["aggregate"]
    assert aggregate["total_reqs"] == aggregate["total_running_reqs"] + aggregate["total_waiting_reqs"] == 0
    assert http.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    generate(http)
    assert http.get("/v1/loads").json()["loads"][0]["num_generated_tokens"] == load["num_generated_tokens"] + 6


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
def test_health(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "elsewhere"])
def test_a_slash_at_the_end_of_a_path_means_nothing(http: httpx.Client, host: str) -> None:
    """A redirect would go where the client says that it is."""
    for path in ("/health/", "/v1/models/", "/health//"):
        assert http.get(path, headers={"host": host}, follow_redirects=False).status_code == 200
    generate(http)
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions/", json=body, follow_redirects=False).status_code == 200


def test_pages(http: httpx.Client) -> None:
    assert http.get("/").headers["content-type"].startswith("text/html")
    schema = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/v1/models"} <= schema["paths"].keys()
    named = schema["components"]["schemas"]
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    messages = named[body["$ref"].rsplit("/", 1)[1]]["properties"]["messages"]
    assert named[messages["items"]["$ref"].rsplit("/", 1)[1]]["properties"]["role"]["enum"]
    missing = [ref for ref in references(schema) if ref.rsplit("/", 1)[1] not in named]
    assert not missing


def references(schema: Any) -> list[str]:
    """All `$ref` in a description."""
    if isinstance(schema, list):
        return [ref for entry in schema for ref in references(entry)]
    if not isinstance(schema, dict):
        return []
    found = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return found + [ref for entry in schema.values() for ref in references(entry)]


def test_responses_that_are_described(http: httpx.Client) -> None:
    """Every operation names the refusals it has, and streams are described where there are some."""
    paths = http.get("/openapi.json").json()["paths"]
    operations = {(path, method): entry for path, item in paths.items() for method, entry in item.items()}
    for (path, method), operation in operations.items():
        statuses = set(operation["responses"])
        assert "422" not in statuses
        reads_any_type = path.startswith("/api/")
        refusals = {"413"} if reads_any_type else {"413", "415"}
        assert refusals <= statuses or method in ("get", "delete")
        assert "400" in statuses or "requestBody" not in operation
        assert "401" in statuses or path in ("/health", "/ready", "/metrics")
        if method == "post":
            answer = http.post(path, content=b"{", headers={"content-type": "text/plain"})
            assert str(answer.status_code) in statuses and answer.status_code == (400 if reads_any_type else 415)
    streaming = {path for (path, _), entry in operations.items() if "text/event-stream" in str(entry["responses"])}
    assert streaming == {"/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert "404" in operations["/v1/models/{model_id}", "get"]["responses"]


def test_tokenize_round_trip(http: httpx.Client) -> None:
    text = "Grüße aus Köln 🙂"
    answer = http.post("/tokenize", json={"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == text
    assert http.post("/v1/detokenize", json={"tokens": [answer["tokens"]] * 2}).json()["text"] == [text] * 2


def test_metrics(http: httpx.Client) -> None:
    generate(http)
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    samples = {line.split(" ")[0].split("{")[0] for line in page.text.splitlines() if not line.startswith("#")}
    expected = {
        "e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "num_running_reqs", "num_queue_reqs", "gen_throughput", "cache_hit_rate",
        "num_used_tokens", "token_usage", "prompt_tokens_total", "generation_tokens_total", "cached_tokens_total",
        "num_requests_total", "spec_accept_length",
    }  # fmt: skip
    assert {f"sglang:{name}" for name in expected} <= samples
    assert 'model_name="tiny"' in page.text and 'engine_type="' in page.text


@pytest.mark.parametrize("stream", [False, True])
def test_times_of_tokens(http: httpx.Client, stream: bool) -> None:
    """An answer that is sent as a whole has a first token and times between tokens, too."""

    def values() -> dict[str, float]:
        lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {line.split("{")[0].removeprefix("sglang:"): float(line.split()[-1]) for line in lines}

    generate(http)  # behind whatever others have left
    before = values()
    params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    http.post("/generate", json={"text": "times of tokens", "sampling_params": params, "stream": stream})
    grown = {name: value - before[name] for name, value in values().items()}
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 1
    assert grown["time_to_first_token_seconds_sum"] < grown["e2e_request_latency_seconds_sum"] / 2
    assert grown["inter_token_latency_seconds_count"] == 59


def test_flush_cache(http: httpx.Client) -> None:
    long_prompt = "flush me " * 40
    generate(http, text=long_prompt)
    assert generate(http, text=long_prompt)["meta_info"]["cached_tokens"] > 0
    assert http.post("/flush_cache").status_code == 200
    assert generate(http, text=long_prompt)["meta_info"]["cached_tokens"] == 0
    assert generate(http, text=long_prompt)["meta_info"]["cached_tokens"] > 0
    refused = http.get("/flush_cache", headers={"Origin": "https://example.com"})
    assert refused.status_code == 403, "a page of somebody else"
    assert http.get("/flush_cache").status_code == 200, "as trainers ask"
    assert generate(http, text=long_prompt)["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_tenants_share_no_prefixes(http: httpx.Client, path: str, field: str) -> None:
    prompt = f"{field} of {path} is a secret " * 20

    def cached(**fields: Any) -> int:
        if path == "/generate":
            return int(generate(http, text=prompt, **fields)["meta_info"]["cached_tokens"])
        answer = http.post(path, json={"prompt": prompt, "max_tokens": 1, **fields}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    tenant, another = f"tenant of {path}", f"another of {path}"
    assert cached(**{field: tenant}) == 0 and cached(**{field: tenant}) > 0
    assert cached(**{field: another}) == 0


class LongRequest:
    """A request that would run to the end of the context, in a thread."""

    def __init__(self, http: httpx.Client, rid: str, max_new_tokens: int = 4000) -> None:
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}
        self.body = {"text": PROMPT, "rid": rid, "sampling_params": params}
        self.response: httpx.Response | None = None
        self.thread = threading.Thread(target=self.run, args=(url_of(http),))
        self.thread.start()
        wait_for(http, lambda state: self.response is not None or state["num_unfinished_reqs"] > 0)

    def run(self, url: str) -> None:
        self.response = httpx.post(f"{url}/generate", json=self.body, timeout=300)

    def result(self) -> httpx.Response:
        self.thread.join(300)
        assert self.response is not None
        return self.response


def wait_for(http: httpx.Client, condition: Any, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition(http.get("/server_info").json()["internal_states"][0]):
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.02)


@pytest.mark.parametrize("body", [{"rid": "long-one"}, {"abort_all": True}])
def test_abort(http: httpx.Client, body: dict[str, Any]) -> None:
    request = LongRequest(http, "long-one")
    assert http.post("/abort_request", json=body).status_code == 200
    response = request.result()
    assert response.status_code == 200
    info = response.json()["meta_info"]
    assert info["finish_reason"]["type"] == "abort" and info["completion_tokens"] < 4000
    wait_for(http, lambda state: state["num_unfinished_reqs"] == 0)


def test_a_running_request_blocks_a_flush_and_its_id(http: httpx.Client) -> None:
    request = LongRequest(http, "taken")
    flush = http.post("/flush_cache")
    again = http.post("/generate", json={"text": "x", "rid": "taken"})
    http.post("/abort_request", json={"rid": "taken"})
    request.result()
    assert flush.status_code == 400 and again.status_code == 400 and "taken" in again.json()["error"]["message"]


def test_a_flush_waits_for_what_runs(http: httpx.Client) -> None:
    request = LongRequest(http, "in the way")
    aborting = threading.Timer(0.3, http.post, ["/abort_request"], {"json": {"rid": "in the way"}})
    aborting.start()
    assert http.post("/flush_cache", params={"timeout": 60}).status_code == 200
    assert request.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    aborting.join()


@pytest.mark.parametrize("body", [None, {}, {"mode": "abort"}])
def test_a_pause_ends_what_runs_by_default(http: httpx.Client, body: dict[str, Any] | None) -> None:
    request = LongRequest(http, "paused")
    answer = http.post("/pause_generation", json=body)
    assert answer.status_code == 200 and answer.json()["status"] == "ok"
    info = request.result().json()["meta_info"]
    assert info["finish_reason"]["type"] == "abort" and info["completion_tokens"] < 4000
    assert http.get("/health").status_code == 200
    later = LongRequest(http, "later", max_new_tokens=2)
    wait_for(http, lambda state: state["num_queue_reqs"] == 1)
    assert later.response is None
    answer = http.post("/continue_generation")
    assert answer.status_code == 200 and answer.json()["status"] == "ok"
    assert later.result().json()["meta_info"]["completion_tokens"] == 2


@pytest.fixture(scope="module")
def undisturbed(http: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = LongRequest(http, "undisturbed", max_new_tokens=300).result().json()
    return answer


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_that_keeps_what_runs(http: httpx.Client, undisturbed: dict[str, Any], mode: str) -> None:
    """The result is the same as without it. Only a retraction lets go of the cache."""
    request = LongRequest(http, "disturbed", max_new_tokens=300)
    assert http.post("/pause_generation", json={"mode": mode}).status_code == 200
    flush = http.post("/flush_cache")
    state = http.get("/server_info").json()["internal_states"][0]
    assert request.response is None and state["num_unfinished_reqs"] == 1
    assert http.post("/continue_generation").status_code == 200
    result = request.result().json()
    assert result["output_ids"] == undisturbed["output_ids"]
    assert flush.status_code == (400 if mode == "in_place" else 200)
    assert result["meta_info"]["num_retractions"] == (mode == "retract")


def test_metrics_follow_what_comes_and_goes_in_a_pause(http: httpx.Client) -> None:
    def shown(name: str) -> list[float]:
        lines = http.get("/metrics").text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}{{")]

    running = LongRequest(http, "runs")
    assert http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    waiting = LongRequest(http, "waits")
    wait_for(http, lambda _: shown("num_running_reqs") == shown("num_queue_reqs") == [1])
    assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert {each.result().status_code for each in (running, waiting)} == {200}
    assert http.post("/continue_generation").status_code == 200
    wait_for(http, lambda _: shown("num_running_reqs") == shown("num_queue_reqs") == [0])


def test_a_profile_is_written(http: httpx.Client, server: LiveServer) -> None:
    assert http.post("/stop_profile").status_code == 400
    assert http.post("/start_profile").status_code == 200
    assert http.post("/start_profile").status_code == 400
    http.post("/generate", json={"text": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert http.post("/stop_profile").status_code == 200
    (trace,) = server.log_path.parent.glob("*.trace.json.gz")
    assert "aten::linear" in gzip.decompress(trace.read_bytes()).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(http: httpx.Client, stream: bool) -> None:
    body = {"text": PROMPT, "stream": stream, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    if stream:
        with httpx.stream("POST", f"{url_of(http)}/generate", json=body, timeout=300) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url_of(http)}/generate", json=body, timeout=0.5)
    wait_for(http, lambda state: state["num_unfinished_reqs"] == 0)


def test_a_client_that_leaves_while_sending_is_no_error(http: httpx.Client, server: LiveServer) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head)
        time.sleep(0.1)
    time.sleep(0.3)  # for the server to notice
    assert http.get("/health").status_code == 200
    assert "Traceback" not in server.log()
