"""bench_serving against a server made here, whose timing and answers are known."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from sglang import bench_serving
from sglang.bench.backends import BACKENDS, GenerateReader, RequestResult
from sglang.bench.datasets import DatasetArgs, DatasetError, make_prompts
from sglang.bench.load import arrival_times
from sglang.bench.summary import Spread, Summary, report
from sglang.bench.tokenizer import PromptTokenizer, load_prompt_tokenizer
from sglang.embedded import DEFAULT_MODEL_PATH

FIRST_TOKEN_S = 0.05
GAP_S = 0.02


class FakeServer:
    """Streams `max tokens` tokens, one an event; the first after FIRST_TOKEN_S, the others GAP_S apart."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.flushes = self.looks = 0
        self.drafts = False
        self.fail_rid = ""
        self.active = 0
        self.most_active = 0
        self.port = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/get_model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "root": DEFAULT_MODEL_PATH}]})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"tokenizer_path": DEFAULT_MODEL_PATH})

    async def server_info(self, _: web.Request) -> web.Response:
        """Each look finds 10 more requests that were verified, with 25 right draft tokens."""
        self.looks += 1
        totals = {"requests": 10 * self.looks, "proposed": 30 * self.looks, "correct": 25 * self.looks + 7}
        state = {"avg_spec_accept_length": 3.6, "spec_totals": totals} if self.drafts else {}
        return web.json_response({"internal_states": [state]})

    async def flush(self, _: web.Request) -> web.Response:
        self.flushes += 1
        return web.Response(text="ok") if self.flushes > 1 else web.Response(status=400, text="busy")

    async def _stream(self, request: web.Request, events: list[Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        for i, event in enumerate(events):
            await asyncio.sleep(FIRST_TOKEN_S if i == 0 else GAP_S)
            data = json.dumps(event).encode() if not isinstance(event, bytes) else event
            await response.write(b"data: " + data[:7])  # an event in two pieces
            await response.write(data[7:] + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.active -= 1
        return response

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return body

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        count = body["sampling_params"]["max_new_tokens"]
        prompt_len = len(body.get("input_ids", [])) or 7
        outputs = [
            {
                "text": "ab" * i,
                "meta_info": {
                    "completion_tokens": i,
                    "prompt_tokens": prompt_len,
                    "cached_tokens": 3,
                    "finish_reason": None,
                },
            }
            for i in range(1, count + 1)
        ]
        if self.fail_rid and len(self.bodies) % 2:
            outputs[-1]["meta_info"]["finish_reason"] = {"type": "abort", "message": self.fail_rid}  # type: ignore[index]
        if not body["stream"]:
            return web.json_response(outputs[-1])
        return await self._stream(request, outputs)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        choices: list[Any] = [{"choices": [{"text": f"w{i}"}]} for i in range(body["max_tokens"])]
        usage = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
        if not body["stream"]:
            return web.json_response({"choices": [{"text": "all"}], "usage": usage})
        return await self._stream(request, [*choices, {"choices": [], "usage": usage}])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        if body["messages"][0]["content"] == "":
            return web.json_response({"message": "empty"}, status=400)
        first = {"choices": [{"delta": {"role": "assistant", "content": "", "reasoning_content": None}}]}
        deltas: list[Any] = [{"choices": [{"delta": {"content": f"w{i}"}}]} for i in range(body["max_tokens"])]
        last = {"choices": [{"delta": {}, "finish_reason": "length"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}}
        return await self._stream(request, [first, *deltas, last, usage])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        ready.set()
        return runner

    holder: list[web.AppRunner] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        holder.append(loop.run_until_complete(start()))
        loop.run_forever()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(300)
    yield fake
    asyncio.run_coroutine_threadsafe(holder[0].cleanup(), loop).result(300)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(300)
    loop.close()


def run(server: FakeServer, *flags: str) -> dict[str, Any]:
    defaults = ["--port", str(server.port), "--disable-tqdm", "--dataset-name", "random-ids", "--num-prompts", "4"]
    lengths = ["--random-input-len", "16", "--random-output-len", "6", "--random-range-ratio", "1.0"]
    return bench_serving.run_benchmark(bench_serving.build_parser().parse_args([*defaults, *lengths, *flags]))


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_times_and_counts(server: FakeServer, backend: str) -> None:
    result = run(server, "--backend", backend, "--warmup-requests", "0")
    assert result["completed"] == 4 and result["total_output_tokens"] == 24
    extra = GAP_S if backend == "sglang-oai-chat" else 0.0  # the role chunk comes first and is no token
    assert FIRST_TOKEN_S + extra <= min(result["ttfts"]) < FIRST_TOKEN_S + extra + 0.15
    assert all(len(gaps) == 5 for gaps in result["itls"])
    assert GAP_S * 0.8 < result["median_itl_ms"] / 1e3 < GAP_S + 0.05
    assert result["mean_tpot_ms"] == pytest.approx(np.mean([np.sum(g) / 5 for g in result["itls"]]) * 1e3)
    assert result["mean_e2e_latency_ms"] / 1e3 > FIRST_TOKEN_S + 5 * GAP_S * 0.9
    assert result["total_input_tokens"] == 4 * (16 if backend == "sglang" else 11)


def test_requests_say_what_was_asked_for(server: FakeServer) -> None:
    extra = '{"sampling_params": {"top_p": 0.5}, "priority": 3}'
    run(server, "--extra-request-body", extra, "--header", "X-Team=blue", "--warmup-requests", "0", "--return-logprob")
    body = server.bodies[0]
    assert len(body["input_ids"]) == 16 and body["stream"] is True and body["priority"] == 3
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, "top_p": 0.5}
    assert server.headers[0]["X-Team"] == "blue"
    run(server, "--backend", "sglang-oai", "--disable-ignore-eos", "--warmup-requests", "0")
    body = server.bodies[-1]
    assert body["model"] == "tiny" and isinstance(body["prompt"], str) and body["ignore_eos"] is False
    assert body["stream_options"] == {"include_usage": True}
    run(server, "--backend", "sglang-oai", "--tokenize-prompt", "--warmup-requests", "0")
    assert len(server.bodies[-1]["prompt"]) == 16


def test_api_key_of_the_environment(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run(server, "--warmup-requests", "0")
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_warm_up_flush_and_concurrency(server: FakeServer) -> None:
    result = run(server, "--warmup-requests", "2", "--flush-cache", "--max-concurrency", "2")
    assert len(server.bodies) == 6 and server.flushes == 2 and result["completed"] == 4
    assert server.most_active == 2
    assert 1 < result["concurrency"] <= 2.01


def test_without_streaming(server: FakeServer) -> None:
    for backend in ("sglang", "sglang-oai"):
        result = run(server, "--disable-stream", "--backend", backend)
        assert result["completed"] == 4 and result["total_output_tokens"] == 24
        assert result["itls"] == [[]] * 4 and server.bodies[-1]["stream"] is False


def test_accept_length(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "accept_length" not in run(server, "--num-prompts", "1")
    server.drafts = True
    assert run(server, "--num-prompts", "1")["accept_length"] == 3.5
    assert re.search(r"Accept length: +3.50", capsys.readouterr().out)


def test_output_file(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    run(server, "--output-file", str(file), "--tag", "x")
    run(server, "--output-file", str(file), "--output-details")
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["tag"] == "x" and "ttfts" not in first and first["request_rate"] == "inf"
    assert second["generated_texts"] == ["ab" * 6] * 4 and len(second["itls"]) == 4
    for key in ("mean_ttft_ms", "median_tpot_ms", "p99_itl_ms", "std_e2e_latency_ms", "output_throughput", "duration"):
        assert first[key] > 0


def test_failures_are_counted_and_shown(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail_rid = "out of luck"
    result = run(server, "--warmup-requests", "0")
    assert (result["completed"], result["failed"]) == (2, 2)
    assert sum("out of luck" in error for error in result["errors"]) == 2
    captured = capsys.readouterr()
    assert "2 of 4 requests failed; the first: aborted: out of luck" in captured.err
    assert "Failed requests:                         2" in captured.out


def test_bad_status_is_a_failure(server: FakeServer) -> None:
    with pytest.raises(bench_serving.BenchError, match="HTTP 400.*empty"):
        run(server, "--backend", "sglang-oai-chat", "--extra-request-body", '{"messages": [{"content": ""}]}')


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serving.main(["--port", "1", "--ready-check-timeout-sec", "0"]) == 2
    assert "cannot connect to 127.0.0.1:1" in capsys.readouterr().err


def test_the_report_has_the_known_rows(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    run(server)
    lines = capsys.readouterr().out.splitlines()
    assert "============ Serving Benchmark Result ============" in lines
    assert "Successful requests:                     4         " in lines
    assert "Traffic request rate:                    inf       " in lines
    names = [line[:40].strip() for line in lines]
    for name in (
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Input token throughput (tok/s):",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
        "Concurrency:",
        *(
            f"{stat} {kind} (ms):"
            for kind in ("E2E Latency", "TTFT", "TPOT", "ITL")
            for stat in ("Mean", "Median", "P99")
        ),
    ):
        assert name in names


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return load_prompt_tokenizer(DEFAULT_MODEL_PATH)


def test_random_ids(tokenizer: PromptTokenizer) -> None:
    args = DatasetArgs(name="random-ids", num_prompts=200, random_input_len=50, random_output_len=20)
    prompts = make_prompts(args, tokenizer)
    assert prompts == make_prompts(args, tokenizer)
    lens = [p.prompt_len for p in prompts]
    assert min(lens) >= 1 and max(lens) <= 50 and min(lens) < 10 and max(lens) > 40
    assert max(p.output_len for p in prompts) <= 20
    assert tokenizer.special_ids and not any(tokenizer.special_ids & set(p.ids or ()) for p in prompts)
    half = make_prompts(DatasetArgs(name="random-ids", num_prompts=50, random_range_ratio=0.5), tokenizer)
    assert min(p.prompt_len for p in half) >= 512


def test_text_prompts_know_their_length(tokenizer: PromptTokenizer) -> None:
    args = DatasetArgs(name="random-ids", num_prompts=5, random_input_len=40, random_range_ratio=1.0, as_ids=False)
    for prompt in make_prompts(args, tokenizer):
        assert prompt.text is not None and prompt.ids is None
        assert prompt.prompt_len == len(tokenizer.encode(prompt.text))


def write_sharegpt(path: Path) -> str:
    turns = [[{"value": f"Question {i}? " + "why " * i}, {"value": "Because it is so."}] for i in range(1, 9)]
    path.write_text(json.dumps([{"conversations": t} for t in turns] + [{"conversations": [{"value": "alone"}]}]))
    return str(path)


def test_sharegpt(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    path = write_sharegpt(tmp_path / "s.json")
    prompts = make_prompts(DatasetArgs(name="sharegpt", path=path, num_prompts=5, as_ids=False), tokenizer)
    assert len(prompts) == 5 and all(p.text and p.text.startswith("Question") for p in prompts)
    assert {p.output_len for p in prompts} == {len(tokenizer.encode("Because it is so."))}
    fixed = make_prompts(DatasetArgs(name="sharegpt", path=path, sharegpt_output_len=9), tokenizer)
    assert len(fixed) == 8 and all(p.output_len == 9 and p.ids for p in fixed)
    limit = sorted(p.prompt_len for p in fixed)[3] + 9
    short = DatasetArgs(name="sharegpt", path=path, sharegpt_output_len=9, sharegpt_context_len=limit)
    assert all(p.prompt_len + 9 <= limit for p in make_prompts(short, tokenizer))
    text = make_prompts(DatasetArgs(name="random", path=path, num_prompts=10, random_input_len=300), tokenizer)
    assert len(text) == 10 and max(p.prompt_len for p in text) > 100


def test_shared_prefixes(tokenizer: PromptTokenizer) -> None:
    args = DatasetArgs(
        name="generated-shared-prefix",
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=20,
        gsp_question_len=5,
        gsp_output_len=7,
    )
    prompts = make_prompts(args, tokenizer)
    assert len(prompts) == 12 and {(p.prompt_len, p.output_len) for p in prompts} == {(25, 7)}
    heads = [tuple((p.ids or [])[:20]) for p in prompts]
    assert sorted(heads.count(h) for h in set(heads)) == [4, 4, 4]
    assert heads != sorted(heads, key=heads.index)  # groups are mixed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (DatasetArgs(name="sharegpt"), "--dataset-path"),
        (DatasetArgs(name="sharegpt", path="/nowhere.json"), "not a ShareGPT file"),
        (DatasetArgs(name="random", random_range_ratio=2.0), "--random-range-ratio"),
        (DatasetArgs(name="poems"), "known: sharegpt"),
    ],
)
def test_dataset_errors(tokenizer: PromptTokenizer, args: DatasetArgs, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        make_prompts(args, tokenizer)


def test_arrivals() -> None:
    assert arrival_times(3, float("inf"), np.random.default_rng(0)) == [0.0] * 3
    times = arrival_times(4000, 8.0, np.random.default_rng(0))
    assert times[0] == 0.0 and times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential


def test_summary() -> None:
    one = RequestResult(10, output_len=5, ttft=0.1, latency=0.5, itl=[0.1] * 4)
    two = RequestResult(20, output_len=1, ttft=0.3, latency=0.3)
    bad = RequestResult(99, output_len=50, error="broken")
    summary = Summary.of([one, two, bad], 2.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (30, 6)
    assert summary.request_throughput == 1.0 and summary.output_throughput == 3.0
    assert summary.tpot.mean == pytest.approx(100) and summary.ttft.mean == pytest.approx(200)
    assert summary.concurrency == pytest.approx(0.4)
    empty = Summary.of([bad], 1.0)
    assert empty.completed == 0 and empty.itl == Spread.of([])
    assert "Max request concurrency:                 not set" in report(empty, "sglang", 1.0, None)


def test_backends_have_the_known_names() -> None:
    assert {"sglang", "sglang-oai", "sglang-oai-chat", "vllm"} <= set(BACKENDS)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, sglang.bench_serving as b; from sglang.embedded import DEFAULT_MODEL_PATH as p;"
        "b.load_prompt_tokenizer(p); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("first", ["text", "meta_info"])
def test_counts_are_read_wherever_they_are(first: str) -> None:
    """Also where the text looks like them."""
    event = {"text": 'a "meta_info":{"completion_tokens":9} and "meta_info":', "meta_info": {"completion_tokens": 4}}
    result = RequestResult(3)
    reader = GenerateReader(result, keep_text=True)
    for separators in ((",", ":"), (", ", ": ")):
        data = json.dumps(dict(sorted(event.items(), key=lambda item: item[0] != first)), separators=separators)
        reader.on_event(data.encode(), 1.0)
    reader.finish(b"", 2.0)
    assert (result.output_len, result.text, reader.clock.chunks) == (4, event["text"], 1)
