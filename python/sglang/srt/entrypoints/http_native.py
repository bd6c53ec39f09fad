"""`/generate` and the routes that look after the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.held_body import body_bytes, releases_body
from sglang.srt.entrypoints.http_body import Body, body_schema, read_body, read_optional_body
from sglang.srt.entrypoints.http_errors import ApiError, bad_request, json_response
from sglang.srt.entrypoints.http_origins import refuse_other_pages
from sglang.srt.entrypoints.http_request_id import PREFIX
from sglang.srt.entrypoints.http_sessions import SessionParams, session_answer, session_events
from sglang.srt.entrypoints.http_state import engine_of, state_of
from sglang.srt.entrypoints.http_stream import Events, EventStream, Generated, until_disconnect
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT, copied
from sglang.srt.entrypoints.native_answer import whole_answer
from sglang.srt.entrypoints.native_reasoning import require_reasoning
from sglang.srt.entrypoints.openai.protocol import Int
from sglang.srt.entrypoints.openai.serving import OpenAIService, off_event_loop
from sglang.srt.entrypoints.output_stream import stream_events
from sglang.srt.entrypoints.unsupported_fields import NATIVE, PROFILE
from sglang.srt.managers.front.generate_request import GenerateRequest
from sglang.srt.managers.front.media.native_media import NativeMedia, native_media
from sglang.srt.managers.front.native_events import NativeEvents
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.version import __version__

router = APIRouter(tags=["native"])

HEALTH_TIMEOUT_S = 20.0
HEALTH_POLL_S = 0.01
FLUSH_LIMIT_S = 3600.0
FLUSH_POLL_S = 0.05
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", PREFIX)
"""Prefixes before the request's id in answers and headers; clients abort by the id that they see."""


class GenerateBody(Body, kw_only=True):
    """Body of `/generate`: `text` or `input_ids`, one prompt or a batch; per-prompt values may be lists."""

    unsupported: ClassVar = NATIVE

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    image_data: NativeMedia = None
    video_data: NativeMedia = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int | list[Int] | None = None
    top_logprobs_num: Int | list[Int] | None = None
    token_ids_logprob: list[Int | list[Int]] | None = None
    return_text_in_logprobs: bool | None = False
    rid: str | list[str] | None = None
    priority: Int | None = None
    cache_salt: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    session_params: SessionParams | None = None
    return_hidden_states: bool | list[bool] | None = None
    require_reasoning: bool | None = False
    """The output begins with thoughts, which are counted; a grammar holds behind them."""

    def to_request(self) -> GenerateRequest:
        """Returns the call. Raises RequestError for wrong media."""
        call = GenerateRequest(
            text=self.text,
            input_ids=self.input_ids,  # type: ignore[arg-type]  # mixed lists are refused with the other checks
            sampling_params=self.sampling_params,
            stream=bool(self.stream),
            return_logprob=self.return_logprob or False,
            logprob_start_len=-1 if self.logprob_start_len is None else self.logprob_start_len,
            top_logprobs_num=self.top_logprobs_num or 0,
            token_ids_logprob=self.token_ids_logprob,  # type: ignore[arg-type]
            return_text_in_logprobs=bool(self.return_text_in_logprobs),
            rid=self.rid,
            priority=self.priority,
            cache_salt=self.cache_salt,
            extra_key=self.extra_key,
            lora_path=self.lora_path,
            return_hidden_states=self.return_hidden_states or False,
        )
        call.media = native_media(self.image_data, self.video_data, call.num_prompts, call.is_batch)
        return call


class AbortBody(Body, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = False


class PauseBody(Body, kw_only=True):
    """`abort` ends everything that runs or waits, `in_place` keeps its KV cache, `retract` sends it back to the queue,
    so that the cache can be flushed. Requests that come during a pause wait."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class ProfileBody(Body, kw_only=True):
    unsupported: ClassVar = PROFILE


BODIES = (GenerateBody, AbortBody, PauseBody, ProfileBody)


@router.post("/generate", openapi_extra=body_schema(GenerateBody))
@router.put("/generate", openapi_extra=body_schema(GenerateBody))
async def generate(request: Request) -> Response:
    engine = engine_of(request)
    manager, sessions = engine.manager, state_of(request).sessions
    incremental = manager.args.incremental_streaming_output
    call, session = await _call(engine, await read_body(request, GenerateBody), body_bytes(request))
    call.repeats_output = not incremental
    releases_body(request, call)
    if not call.stream:
        whole = whole_answer(manager, call) if session is None else session_answer(manager, sessions, call, session)
        return await until_disconnect(request, whole)
    if session is None:
        return await stream_events(
            manager, request, call, lambda stream: NativeEvents(manager, call, stream, incremental),
            begins_with_output=True,
        )  # fmt: skip
    events = session_events(manager, sessions, call, session, incremental)
    first = await until_disconnect(request, _first(events))
    return EventStream(first, Generated(events), _itself, request.url.path, length=_length)


async def _call(
    engine: OpenAIService, body: GenerateBody, num_bytes: int
) -> tuple[GenerateRequest, SessionParams | None]:
    """Returns the call, and the session that it continues, if any."""
    call = body.to_request()
    if body.require_reasoning:
        await off_event_loop(engine, num_bytes, require_reasoning, engine, call)
    return call, body.session_params if body.session_params and body.session_params.id else None


async def _first(events: AsyncIterator[Events]) -> Events:
    return await anext(events)


def _itself(events: Events) -> Events:
    return events


def _length(events: Events) -> int:
    """Returns the length of events that are written already: long ones are in pieces."""
    return LONG_OUTPUT + 1 if isinstance(events, list) else copied(len(events))


# --- what the server is -----------------------------------------------------------------------------------------------


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)
async def model_info(request: Request) -> Response:
    manager = engine_of(request).manager
    args, model = manager.args, manager.model_config
    return json_response(
        {
            "model_path": manager.weights.model_path,
            "tokenizer_path": args.tokenizer_path,
            "served_model_name": args.served_model_name,
            "is_generation": not args.is_embedding,
            "preferred_sampling_params": args.preferred_sampling_params,
            "weight_version": manager.weight_version,
            "model_type": model.hf_config.get("model_type"),
            "architectures": [model.architecture],
            "max_model_len": model.context_len,
            "vocab_size": model.vocab_size,
            "has_image_understanding": manager.media is not None,
            "has_audio_understanding": False,
        }
    )


@router.get("/weight_version", include_in_schema=False)
@router.get("/get_weight_version", include_in_schema=False)
async def weight_version(request: Request) -> Response:
    return json_response({"weight_version": engine_of(request).manager.weight_version})


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
async def server_info(request: Request) -> Response:
    """All resolved arguments, what the plan decided, and the scheduler's state now."""
    engine = engine_of(request)
    manager = engine.manager
    return json_response(
        {
            **manager.args.public_dict(),
            "tool_call_parser": engine.formats.calls_name,
            "reasoning_parser": engine.formats.reasoning_name,
            **manager.scheduler_info,
            "version": __version__,
            "status": manager.status.name.lower(),
            "internal_states": await manager.internal_states(),
        }
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Returns the load of each replica that serves (`dp_rank`), and the load of all together."""
    manager = engine_of(request).manager
    loads = [
        {
            **state,
            "num_waiting_reqs": state["num_queue_reqs"],
            "num_total_reqs": state["num_running_reqs"] + state["num_queue_reqs"],
            "token_usage": round(state["num_used_tokens"] / state["max_total_num_tokens"], 4),
            "gen_throughput": state["last_gen_throughput"],
            "cache_hit_rate": manager.replicas[state["dp_rank"]].stats.cache_hit_rate,
        }
        for state in await manager.internal_states()
        if "failure" not in state
    ]

    def total(name: str) -> Any:
        return sum(load[name] for load in loads)

    return json_response(
        {
            "timestamp": time.time(),
            "version": __version__,
            "dp_rank_count": len(loads),
            "loads": loads,
            "aggregate": {
                "total_running_reqs": total("num_running_reqs"),
                "total_waiting_reqs": total("num_waiting_reqs"),
                "total_reqs": total("num_total_reqs"),
                "avg_token_usage": round(total("token_usage") / len(loads), 4),
                "avg_throughput": total("gen_throughput") / len(loads),
            },
        }
    )


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """Returns the requests and tokens of each replica that serves: an older form of `/v1/loads`."""
    return json_response(
        [
            {
                "dp_rank": state["dp_rank"],
                "num_reqs": state["num_running_reqs"] + state["num_queue_reqs"],
                "num_waiting_reqs": state["num_queue_reqs"],
                "num_tokens": state["num_used_tokens"],
            }
            for state in await engine_of(request).manager.internal_states()
            if "failure" not in state
        ]
    )


# --- health -----------------------------------------------------------------------------------------------------------


@router.get("/health")
@router.get("/ready")
@router.get("/ping")
async def health(request: Request) -> Response:
    """200 with an empty body when requests are served, or with a word if the server sleeps; otherwise 503 with the
    reason."""
    state = state_of(request)
    reason = state.unavailable()
    if reason is not None or state.engine is None:
        return PlainTextResponse(reason or "the server is starting", 503)
    return _sleeping(state.engine.manager) or Response(status_code=200)


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """Answers as `/health` does, after one token has been generated, or any other output has come from the engine
    meanwhile."""
    manager = engine_of(request).manager
    if (sleeping := _sleeping(manager)) is not None:
        return sleeping
    if await until_disconnect(request, engine_responds(manager, HEALTH_TIMEOUT_S)):
        return Response(status_code=200)
    return PlainTextResponse(f"no output from the engine within {HEALTH_TIMEOUT_S:.0f} s", 503)


def _sleeping(manager: TokenizerManager) -> Response | None:
    """Returns the answer of a server that sleeps, which is no failure; None if it is awake."""
    return PlainTextResponse("sleeping", 200) if manager.state.asleep else None


async def warm_up(manager: TokenizerManager) -> None:
    """Sends every replica its first request. Raises RequestError."""
    await asyncio.gather(*(generate_one_token(manager, replica.index) for replica in manager.replicas))


async def generate_one_token(manager: TokenizerManager, replica: int | None = None) -> None:
    """Generates one token, or an embedding on a server of embeddings. replica: its index; None: any. Raises
    RequestError."""
    embed = manager.args.is_embedding
    params = None if embed else {"max_new_tokens": 1, "temperature": 0.0}
    call = GenerateRequest(input_ids=[0], sampling_params=params, embed=embed, replica=replica)
    async with await manager.submit(call) as stream:
        await stream.collect()


async def engine_responds(manager: TokenizerManager, limit_s: float) -> bool:
    """Returns whether the engine sends any output within the limit: the token requested here or, if that has to wait,
    anybody's."""
    started = time.monotonic()
    token = asyncio.ensure_future(generate_one_token(manager))
    try:
        while manager.last_receive_time <= started:
            if time.monotonic() - started > limit_s:
                return False
            await asyncio.sleep(HEALTH_POLL_S)
        return True
    finally:
        token.cancel()
        await asyncio.gather(token, return_exceptions=True)


# --- control ----------------------------------------------------------------------------------------------------------


async def _control(request: Request, kind: str, done: str, args: dict[str, Any] | None = None) -> Response:
    reply = await engine_of(request).manager.control(kind, args)
    if not reply.ok:
        raise bad_request(reply.message or f"{kind} failed")
    return PlainTextResponse(done + "\n")


_FLUSH_TIMEOUT = {
    "parameters": [
        {
            "name": "timeout",
            "in": "query",
            "description": "Seconds to wait until nothing runs or waits",
            "schema": {"type": "number", "minimum": 0, "maximum": FLUSH_LIMIT_S, "default": 0},
        }
    ]
}


@router.get("/flush_cache", include_in_schema=False)
@router.post("/flush_cache", openapi_extra=_FLUSH_TIMEOUT)
async def flush_cache(request: Request) -> Response:
    """Empties the prefix cache, which requests that run or wait are in the way of."""
    refuse_other_pages(request)
    limit_s = _seconds(request.query_params.get("timeout", "0"))
    return await until_disconnect(request, _flush_when_idle(request, limit_s))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= FLUSH_LIMIT_S:
        raise bad_request(f"timeout must be a number of seconds in [0, {FLUSH_LIMIT_S:.0f}]", param="timeout")
    return seconds


async def _flush_when_idle(request: Request, limit_s: float) -> Response:
    end = time.monotonic() + limit_s
    while True:
        try:
            return await _control(request, "flush_cache", "Cache flushed.")
        except ApiError as error:
            if error.status != 400 or time.monotonic() >= end:
                raise
        await asyncio.sleep(FLUSH_POLL_S)


@router.post("/pause_generation", openapi_extra=body_schema(PauseBody, required=False))
async def pause_generation(request: Request) -> Response:
    """No further step runs until /continue_generation; `mode` says what happens to the requests of now."""
    mode = (await read_optional_body(request, PauseBody)).mode
    await _control(request, "pause", "", {"mode": mode})
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    await _control(request, "resume", "")
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@router.post("/start_profile", openapi_extra=body_schema(ProfileBody, required=False))
async def start_profile(request: Request) -> Response:
    """Trace the schedulers for at most 500 steps, until /stop_profile; files go to $SGLANG_TORCH_PROFILER_DIR."""
    await read_optional_body(request, ProfileBody)
    return await _control(request, "start_profile", "Profiling.")


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    return await _control(request, "stop_profile", "The trace was written.")


@router.post("/abort_request", openapi_extra=body_schema(AbortBody))
async def abort_request(request: Request) -> Response:
    """Ends requests early; a rid that is unknown or has ended is not an error, since both race."""
    manager = engine_of(request).manager
    body = await read_body(request, AbortBody)
    if body.abort_all:
        manager.abort_all()
    elif body.rid:
        prefix = next((prefix for prefix in ANSWER_PREFIXES if body.rid.startswith(prefix)), "")
        _ = manager.abort(body.rid) or manager.abort(body.rid.removeprefix(prefix))
    else:
        raise bad_request("give the rid of the request to abort, or abort_all: true", param="rid")
    return Response(status_code=200)


# --- metrics ----------------------------------------------------------------------------------------------------------


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    state = state_of(request)
    if not state.args.enable_metrics:
        raise ApiError(404, "metrics are off: start the server with --enable-metrics")
    engine = state.engine
    if engine is None or engine.manager.metrics is None:
        raise ApiError(503, state.unavailable() or "the server is starting")
    return Response(engine.manager.metrics.render(), headers={"content-type": METRICS_TYPE})
