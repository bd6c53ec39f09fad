from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.front import request_preparation, result_limits
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError, TextPair
from sglang.srt.managers.front.request_preparation import PreparedCall, RequestPreparer
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.managers.wire.token_ids import decoder, encoder
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

CONTEXT, VOCAB = 32, 100


async def encode(text: str, add_special_tokens: bool) -> list[int]:
    """A letter is a token; 0 is the beginning."""
    return [0] * add_special_tokens + [ord(c) % VOCAB for c in text]


def preparer(tokenizer: bool = True, model_defaults: dict[str, Any] | None = None, **flags: Any) -> RequestPreparer:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, **flags)
    model = dataclasses.replace(
        ModelConfig.from_server_args(args), context_len=CONTEXT, vocab_size=VOCAB, default_sampling=model_defaults or {}
    )
    return RequestPreparer(args, model, encode if tokenizer else None)


def prepare(flags: dict[str, Any] | None = None, **fields: Any) -> PreparedCall:
    return asyncio.run(preparer(**(flags or {})).prepare(GenerateRequest(**fields)))


def test_one_prompt() -> None:
    call = prepare(text="ab", sampling_params={"max_new_tokens": 3}, rid="x", priority=2)
    (request,) = call.requests
    assert (call.rids, call.prompt_texts, call.num_samples) == (["x"], ["ab"], 1)
    assert (request.rid, request.input_ids.tolist(), request.priority) == ("x", [0, 97, 98], 2)
    assert request.sampling_params == SamplingParams(max_new_tokens=3)
    assert prepare(text="ab", add_special_tokens=False).requests[0].input_ids.tolist() == [97, 98]


def test_batch_spreads_values() -> None:
    call = prepare(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"top_k": 1}, {"top_k": 2}],
        return_logprob=[True, False],
        top_logprobs_num=4,
        token_ids_logprob=[[5], [6]],
    )
    a, b = call.requests
    assert (a.sampling_params.top_k, b.sampling_params.top_k) == (1, 2)
    assert (a.return_logprob, b.return_logprob, a.top_logprobs_num, b.top_logprobs_num) == (True, False, 4, 4)
    assert (a.token_ids_logprob, b.token_ids_logprob) == ([5], [6])
    assert a.rid != b.rid
    assert call.prompt_texts == [None, None]
    assert [r.token_ids_logprob for r in prepare(input_ids=[[1], [2]], token_ids_logprob=[7, 8]).requests] == [
        [7, 8]
    ] * 2
    assert prepare(input_ids=[[1], [2]], rid="x").rids == ["x_0", "x_1"]


def test_every_salt_and_key_has_a_cache_of_its_own() -> None:
    def namespaces(**fields: Any) -> list[str | None]:
        return [r.cache_namespace for r in prepare(input_ids=[[1], [2]], **fields).requests]

    assert namespaces() == namespaces(cache_salt="", extra_key=["", None]) == [None, None]
    names = [*namespaces(cache_salt="a", extra_key=["b", "c"]), *namespaces(cache_salt=["a", "ab"]), "ab"]
    names += [*namespaces(extra_key="a")[:1], *namespaces(cache_salt="c", extra_key="ab")[:1]]
    assert len(set(names)) == len(names) and None not in names
    assert namespaces(extra_key="a") == namespaces(extra_key=["a", "a"])


def test_samples_get_names_and_seeds_of_their_own() -> None:
    call = prepare(input_ids=[[1], [2]], rid=["a", "b"], sampling_params={"n": 2, "sampling_seed": 7})
    assert [r.rid for r in call.requests] == ["a_0", "a_1", "b_0", "b_1"]
    assert [r.sampling_params.sampling_seed for r in call.requests] == [7, 8, 7, 8]
    assert {r.sampling_params.n for r in call.requests} == {1}
    top = (1 << 63) - 1
    seeds = [
        r.sampling_params.sampling_seed
        for r in prepare(input_ids=[1], sampling_params={"n": 2, "sampling_seed": top}).requests
    ]
    assert seeds == [top, -(1 << 63)]


def test_defaults_of_the_model_and_the_server() -> None:
    flags = {"model_defaults": {"temperature": 0.5, "top_p": 0.5}, "preferred_sampling_params": '{"top_p": 0.25}'}
    params = prepare(flags, input_ids=[1], sampling_params={"top_k": 3}).requests[0].sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
    openai = prepare({**flags, "sampling_defaults": "openai"}, input_ids=[1]).requests[0].sampling_params
    assert (openai.temperature, openai.top_p) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": 5}, "text must be"),
        ({"text": ["a", 5]}, "text must be"),
        ({"input_ids": 5}, "text must be"),
        ({"input_ids": "abc"}, "text must be"),
        ({"input_ids": [1.5]}, "text must be"),
        ({"input_ids": [1, "2"]}, "must be integers"),
        ({"input_ids": [1, True]}, "must be integers"),
        ({"input_ids": [1, None]}, "must be integers"),
        ({"text": []}, "1 to 4096 prompts"),
        ({"input_ids": []}, "empty"),
        ({"text": "", "add_special_tokens": False}, "empty"),
        ({"input_ids": [1, 100]}, "in [0, 99], got 100"),
        ({"input_ids": [-1]}, "in [0, 99], got -1"),
        ({"input_ids": [1] * 32}, "with room for output is longer than the model's context length of 32"),
        ({"text": "a" * 40}, "41 tokens with room for output is longer than the model's context length"),
        ({"text": "a" * 100_000}, "100000 characters is longer"),
        (
            {"input_ids": [1] * 20, "sampling_params": {"max_new_tokens": 13}},
            "max_new_tokens of 13 is longer than the model's context length of 32 tokens. Ask for at most 12 tokens.",
        ),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1], got 0."),
        ({"input_ids": [1], "sampling_params": {"nope": 0}}, "unknown sampling parameter 'nope'"),
        ({"input_ids": [1], "sampling_params": "x"}, "sampling_params must be an object"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "2 entries for 1 prompts"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same"),
        ({"input_ids": [1], "rid": ""}, "rid must be a string of 1 to 256"),
        ({"input_ids": [1], "rid": "x" * 257}, "rid must be a string of 1 to 256"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid must be"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "different"),
        ({"input_ids": [1], "logprob_start_len": 1}, "logprob_start_len must be in [-1, 0]"),
        ({"input_ids": [1], "logprob_start_len": "0"}, "logprob_start_len must be of type int"),
        ({"input_ids": [1], "top_logprobs_num": -1}, "top_logprobs_num must be in [0, 100]"),
        ({"input_ids": [1], "token_ids_logprob": [100]}, "token_ids_logprob must hold token ids in [0, 99], got 100"),
        ({"input_ids": [1], "token_ids_logprob": ["a"]}, "token_ids_logprob must be of type list"),
        ({"input_ids": [[1], [2]], "token_ids_logprob": [[1] * 99, 1]}, "list, got [[1, 1, 1, 1, 1, 1, ...], 1]."),
        ({"input_ids": [1], "token_ids_logprob": [1] * 4097}, "token_ids_logprob must have at most 4096 token ids"),
        ({"input_ids": [1], "priority": 1 << 64}, "priority must be a 32-bit integer"),
        ({"input_ids": [[1]] * 129, "sampling_params": {"n": 128}}, "129 prompts with n=128 make 16512"),
        ({"input_ids": [[1] * 17] * 4096, "sampling_params": {"n": 4}}, "at most 262144 tokens"),
        ({"input_ids": [[1]] * 65, "token_ids_logprob": [1] * 4096}, "at most 262144 tokens"),
        ({"input_ids": [[1], [2]], "extra_key": ["a"]}, "extra_key has 1 entries for 2 prompts"),
        ({"input_ids": [1], "cache_salt": "x" * 1025}, "cache_salt must be a string of at most 1024"),
        ({"input_ids": [[1], [2]], "return_logprob": [True]}, "return_logprob has 1 entries for 2 prompts"),
    ],
)
def test_wrong_requests(fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_preparation, "MAX_CALL_TOKENS", 1 << 18)
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    assert caught.value.status_code == 400
    assert message in caught.value.message


def test_without_a_tokenizer() -> None:
    for fields in ({"text": "a"}, {"input_ids": [1], "sampling_params": {"stop": "x"}}):
        with pytest.raises(RequestError, match="--skip-tokenizer-init"):
            prepare({"tokenizer": False}, **fields)


def test_output_length_and_the_context() -> None:
    def limit(flags: dict[str, Any] | None = None, **params: Any) -> int | None:
        return prepare(flags, input_ids=[1] * 20, sampling_params=params).requests[0].sampling_params.max_new_tokens

    assert limit() == 12  # the default of 128 shrinks
    assert limit(max_new_tokens=None) is None
    assert limit(max_new_tokens=12) == 12
    assert limit({"allow_auto_truncate": True}, max_new_tokens=13, min_new_tokens=13) == 12


@pytest.mark.parametrize(("wanted", "given"), [(12, 12), (13, 12), (1 << 30, 12)])
def test_an_output_length_that_is_cut_to_the_context(wanted: int, given: int) -> None:
    call = prepare(input_ids=[1] * 20, sampling_params={"max_new_tokens": wanted}, cuts_length=True)
    assert call.requests[0].sampling_params.max_new_tokens == given


def test_auto_truncate() -> None:
    request = prepare({"allow_auto_truncate": True}, input_ids=list(range(40))).requests[0]
    assert request.input_ids.tolist() == list(range(31))
    assert request.sampling_params.max_new_tokens == 1


def test_a_large_batch_leaves_the_loop_alone() -> None:
    """Whatever else wants to run gets its turns while the prompts are tokenized."""

    async def main() -> int:
        work = asyncio.ensure_future(
            preparer(allow_auto_truncate=True).prepare(GenerateRequest(text=["a" * 4096] * 64))
        )
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(work.result().requests) == 64
        return turns

    assert asyncio.run(main()) > 10


def test_parameters_of_many_prompts_leave_the_loop_alone() -> None:
    async def main() -> int:
        fields = {"input_ids": [[1]] * 100, "sampling_params": [{"stop_regex": "a+b"}] * 99 + [{"top_p": 0}]}
        work = asyncio.ensure_future(preparer().prepare(GenerateRequest(**fields)))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="top_p"):
            work.result()
        return turns

    assert asyncio.run(main()) >= 99


def test_patterns_of_all_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a batch with one each; one for all prompts counts once."""
    monkeypatch.setattr(request_preparation, "MAX_CALL_PATTERN_CHARS", 10)
    batch = {"input_ids": [[1]] * 3}
    prepare(**batch, sampling_params={"stop_regex": "a" * 10})
    prepare(**batch, sampling_params=[{"stop_regex": "a" * 5}, {}, {"stop_regex": "a" * 5}])
    with pytest.raises(RequestError, match="may have 10 characters in all; give one for all prompts, or send several"):
        prepare(**batch, sampling_params=[{"stop_regex": "a" * 5}] * 3)


@pytest.mark.parametrize(
    ("params", "num_bytes"),
    [
        ({"stop_token_ids": [7] * 50}, 2000),
        ({"logit_bias": {"7": 1.0, "8": 1.0}}, 400),
        ({"json_schema": "{}".ljust(300)}, 300),
        ({"regex": "a" * 300}, 300),
        ({"stop": ["a" * 100, "b" * 50], "stop_regex": "c" * 50}, 200),
    ],
)
def test_parameters_are_bounded_for_all_samples_together(
    params: dict[str, Any], num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample has them once in the scheduler's memory."""
    batch = {"input_ids": [[1]] * 3, "sampling_params": {**params, "n": 2}}
    monkeypatch.setattr(request_preparation, "MAX_CALL_PARAMETER_BYTES", 6 * num_bytes)
    assert len(prepare(**batch).requests) == 6
    monkeypatch.setattr(request_preparation, "MAX_CALL_PARAMETER_BYTES", 6 * num_bytes - 1)
    with pytest.raises(RequestError, match=f"may take {6 * num_bytes - 1} bytes, .* these take {6 * num_bytes}; send"):
        prepare(**batch)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_text_that_cannot_fit_is_not_tokenized_as_a_whole(monkeypatch: pytest.MonkeyPatch, truncate: bool) -> None:
    monkeypatch.setattr(request_preparation, "PIECE_CHARS", 200)
    lengths: list[int] = []

    async def counting(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return await encode(text, add_special_tokens)

    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, allow_auto_truncate=truncate)
    model = dataclasses.replace(ModelConfig.from_server_args(args), context_len=CONTEXT, vocab_size=VOCAB)
    work = RequestPreparer(args, model, counting).prepare(GenerateRequest(text="a" * 10_000))
    if truncate:
        assert len(asyncio.run(work).requests[0].input_ids) == CONTEXT - 1
    else:
        with pytest.raises(RequestError, match="10000 characters is longer than the model's context length"):
            asyncio.run(work)
    assert max(lengths) == 200


def test_log_probabilities_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and outputs, for every prompt and sample. A length that nobody asked for shrinks to what may be."""
    monkeypatch.setattr(result_limits, "MAX_LOGPROBS", 60)
    prompt = {"input_ids": [1, 2, 3, 4], "return_logprob": True}
    assert prepare(**prompt, sampling_params={"max_new_tokens": 28}).requests[0].sampling_params.max_new_tokens == 28
    wanted = {**prompt, "top_logprobs_num": 1, "token_ids_logprob": [5], "logprob_start_len": 0}
    for given in (None, {"max_new_tokens": None}, {"min_new_tokens": 20}):
        (request,) = prepare(**wanted, sampling_params=given).requests
        assert request.sampling_params.max_new_tokens == 16 and request.sampling_params.min_new_tokens <= 16
    prepare(**wanted, sampling_params={"max_new_tokens": 16})
    (request,) = prepare(**{**wanted, "return_logprob": False}).requests
    assert request.sampling_params.max_new_tokens == 28
    for fields in (
        {"sampling_params": {"max_new_tokens": 17}},
        {"sampling_params": {"max_new_tokens": 7, "n": 2}},
        {"input_ids": [[1] * 4, [1] * 4], "sampling_params": {"max_new_tokens": 7}},
        {"sampling_params": {"n": 6}},
        {"input_ids": [1] * 20},
    ):
        with pytest.raises(RequestError, match="ask for fewer"):
            prepare(**{**wanted, **fields})


def test_streams_that_repeat_log_probabilities_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_limits, "MAX_REPEATED_LOGPROBS", 20)
    wanted = {"input_ids": [1, 2, 3, 4], "return_logprob": True, "sampling_params": {"max_new_tokens": 21}}
    prepare(**wanted, stream=True)
    prepare(**wanted, repeats_output=True)
    with pytest.raises(RequestError, match="20 for all its prompts and samples in a stream that repeats them"):
        prepare(**wanted, stream=True, repeats_output=True)


def test_hidden_states_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and outputs, for every prompt and sample. A length that nobody asked for shrinks to what may be."""
    flags = {"enable_return_hidden_states": True}
    hidden_size = ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH)).hf_config[
        "hidden_size"
    ]
    monkeypatch.setattr(result_limits, "MAX_CALL_BYTES", 20 * hidden_size * 4)
    wanted = {"input_ids": [1, 2, 3, 4], "return_hidden_states": True}
    for given in (None, {"max_new_tokens": None}, {"max_new_tokens": 17}, {"min_new_tokens": 20}):
        (request,) = prepare(flags, **wanted, sampling_params=given).requests
        assert request.hidden_start == 0 and request.sampling_params.max_new_tokens == 17
    for fields in (
        {"sampling_params": {"max_new_tokens": 18}},
        {"sampling_params": {"max_new_tokens": 8, "n": 2}},
        {"input_ids": [[1, 2, 3, 4]] * 2, "sampling_params": {"max_new_tokens": 8}},
        {"input_ids": [1] * 21},
    ):
        with pytest.raises(RequestError, match="hidden states each are more than a call may have"):
            prepare(flags, **{**wanted, **fields})
    one_of_two = {**wanted, "input_ids": [[1, 2, 3, 4]] * 2, "return_hidden_states": [True, False]}
    starts = [r.hidden_start for r in prepare(flags, **one_of_two, sampling_params={"max_new_tokens": 17}).requests]
    assert starts == [0, -1]
    with pytest.raises(RequestError, match="--enable-return-hidden-states"):
        prepare(**wanted)


def test_samples_share_an_array_of_four_bytes_a_token() -> None:
    first, *others = prepare(input_ids=list(range(20)), sampling_params={"n": 3}).requests
    assert first.input_ids.nbytes == 80
    assert len(others) == 2 and all(other.input_ids is first.input_ids for other in others)
    message = encoder().encode(first)
    assert len(message) < len(encoder().encode(prepare(input_ids=[1]).requests[0])) + 19 * 4 + 64
    assert decoder(TokenizedGenerateReq).decode(message).input_ids.tolist() == list(range(20))


async def framed(text: str, add_special_tokens: bool) -> list[int]:
    """As `encode`, with a token behind every text, too."""
    ids = await encode(text, add_special_tokens)
    return [*ids, 1] if add_special_tokens else ids


async def framed_pair(pair: TextPair) -> tuple[list[int], int]:
    first, second = await encode(pair.first, False), await encode(pair.second, False)
    return [0, *first, 1, *second, 1], len(first) + 2


def embedded(*texts: Any, **flags: Any) -> list[TokenizedGenerateReq]:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, is_embedding=True, **flags)
    model = dataclasses.replace(ModelConfig.from_server_args(args), context_len=CONTEXT, vocab_size=VOCAB)
    made = RequestPreparer(args, model, framed, encode_pair=framed_pair)
    return asyncio.run(made.prepare(GenerateRequest(text=list(texts), embed=True))).requests


def test_embeddings_need_no_room_for_output() -> None:
    (request,) = embedded("a" * (CONTEXT - 2))
    assert len(request.input_ids) == CONTEXT and request.hidden_start == CONTEXT - 1
    with pytest.raises(RequestError, match=f"prompt of {CONTEXT + 1} tokens is longer than the model's context"):
        embedded("a" * (CONTEXT - 1))


def test_texts_that_are_cut_keep_the_token_that_ends_them() -> None:
    long, pair = embedded("a" * 50, TextPair("bb", "c" * 50), allow_auto_truncate=True)
    assert long.input_ids.tolist() == [0, *[97] * (CONTEXT - 2), 1] and long.segment_start == 0
    assert pair.input_ids.tolist() == [0, 98, 98, 1, *[99] * (CONTEXT - 5), 1] and pair.segment_start == 4


def test_pairs_need_a_tokenizer() -> None:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, is_embedding=True)
    made = RequestPreparer(args, ModelConfig.from_server_args(args), None)
    with pytest.raises(RequestError, match="pairs of texts cannot be joined"):
        asyncio.run(made.prepare(GenerateRequest(text=[TextPair("a", "b")], embed=True)))
