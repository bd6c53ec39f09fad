from __future__ import annotations

import sys
from typing import Any

import pytest

from sglang.srt.sampling.sampling_params import SamplingParams, merge

VOCAB = 100


def check(**values: Any) -> SamplingParams:
    params = merge(values)
    params.verify(VOCAB)
    return params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
        ({"temperature": -0.1}, "temperature must be in [0, 1e+06], got -0.1."),
        ({"temperature": float("nan")}, "temperature must be in [0, 1e+06], got nan."),
        ({"temperature": float("inf")}, "temperature must be in [0, 1e+06], got inf."),
        ({"temperature": 1e7}, "temperature must be in [0, 1e+06], got 1e+07."),
        ({"temperature": 10**400}, "temperature: number out of range"),
        ({"top_k": 0}, "top_k must be -1 (all) or in [1, 2147483647], got 0."),
        ({"top_k": -2}, "top_k must be -1 (all) or in [1, 2147483647], got -2."),
        ({"top_k": 1 << 64}, "top_k must be -1 (all) or in [1, 2147483647], got 18446744073709551616."),
        ({"top_k": 10**400}, "top_k must be -1 (all) or in [1, 2147483647], got an integer of 1329 bits."),
        ({"top_k": 10**5000}, "top_k must be -1 (all) or in [1, 2147483647], got an integer of 16610 bits."),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1."),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be in [-2, 2], got 2.5."),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3."),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2], got 0."),
        ({"n": 0}, "n must be in [1, 128], got 0."),
        ({"n": 10**400}, "n must be in [1, 128], got an integer of 1329 bits."),
        ({"n": -(10**400)}, "n must be in [1, 128], got an integer of 1329 bits."),
        ({"max_new_tokens": -1}, "max_new_tokens must be in [0, 2147483647], got -1."),
        ({"max_new_tokens": 10**400}, "max_new_tokens must be in [0, 2147483647], got an integer"),
        ({"min_new_tokens": 10**400}, "min_new_tokens must be in [0, max_new_tokens=128], got an integer"),
        ({"min_new_tokens": 1 << 64, "max_new_tokens": None}, "min_new_tokens must be in [0, max_new_tokens=2147"),
        ({"sampling_seed": 10**400}, "sampling_seed must be a 64-bit integer, got an integer of 1329 bits."),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens must be in [0, max_new_tokens=4], got 9."),
        ({"sampling_seed": 1 << 63}, "sampling_seed must be a 64-bit integer"),
        ({"stop": ["x"] * 33}, "stop must have at most 32 strings, got 33."),
        ({"stop": "x" * 1025}, "A stop string must have at most 1024 characters, got 1025; its beginning will do."),
        ({"stop": "\ud800"}, "stop is not valid Unicode: a lone surrogate at position 0."),
        ({"stop_regex": "("}, "stop_regex is not a regular expression"),
        ({"stop_token_ids": [1] * 65_537}, "stop_token_ids must have at most 65536, got 65537."),
        ({"stop_regex": ["x"] * 33}, "stop_regex must have at most 32 patterns, got 33."),
        ({"stop_regex": ["x" * 1500] * 2}, "stop_regex must have at most 2048 characters in all, got 3000."),
        ({"stop_regex": "(" * 400 + "a" + ")" * 400}, "stop_regex may nest 32 groups, got 400; flatten it."),
        ({"stop_regex": "a{99999999999999999999}"}, "the repetition number is too large"),
        ({"stop_regex": "a{4294967294}"}, "stop_regex has 8.58993e+09 elements when its repetitions are written out"),
        ({"stop_regex": "((a{100}){100}){100}"}, "at most 4096 are allowed; use smaller counts, or + and *."),
        ({"stop_regex": "a{2000}|(?:b{3000,}?)"}, "at most 4096 are allowed"),
        ({"stop_regex": ["a{1500}", "b{1500}"]}, "at most 4096 are allowed"),
        ({"regex": "\udfff"}, "regex is not valid Unicode: a lone surrogate at position 0."),
        ({"ebnf": "x" * (1 << 18) + "y"}, "ebnf must have at most 262144 characters, got 262145; simplify it."),
        ({"logit_bias": {"100": 1.0}}, "logit_bias keys must be token ids in [0, 99], got '100'."),
        ({"logit_bias": {"x": 1.0}}, "logit_bias keys must be token ids in [0, 99], got 'x'."),
        ({"logit_bias": {"1" * 5000: 1.0}}, "logit_bias keys must be token ids in [0, 99], got '1111"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias values must be in [-1e+09, 1e+09], got inf for token 1."),
        ({"logit_bias": {"1": 1e300}}, "logit_bias values must be in [-1e+09, 1e+09], got 1e+300 for token 1."),
        ({"logit_bias": {"1": 10**400}}, "logit_bias: number out of range"),
        ({"x" * 100_000: 1}, "unknown sampling parameter 'xxx"),
        ({"json_schema": {"enum": [1] * 20_000}}, "json_schema has more than 20000 values"),
        ({"structural_tag": {"a": ["b" * 262_144]}}, "structural_tag must have at most 262144 characters"),
        ({"regex": "a", "ebnf": "b"}, "only one of json_schema, regex, ebnf, structural_tag"),
        ({"temperature": "hot"}, "temperature: expected float, got str in 'hot'."),
        ({"temperature": True}, "temperature: expected float, got bool in True."),
        ({"top_k": 1.5}, "top_k: expected int, got float in 1.5."),
        ({"stop": [1]}, "stop: expected str, got int in [1]."),
        ({"max_tokens": 4}, "unknown sampling parameter 'max_tokens'; did you mean 'max_new_tokens'?"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(**values)
    assert message in str(caught.value) and len(str(caught.value)) < 500


def test_stop_ids_outside_the_vocabulary_are_harmless() -> None:
    assert check(stop_token_ids=[-1, 0, 99, 100, 1 << 64, 10**400]).stop_token_ids == [0, 99]


def test_edges_of_the_ranges_pass() -> None:
    check(
        temperature=0, top_p=1, top_k=1, min_p=0, frequency_penalty=-2, presence_penalty=2, repetition_penalty=2, n=128
    )
    check(
        min_p=1, top_k=-1, max_new_tokens=0, sampling_seed=-(1 << 63), logit_bias={"99": -100.0}, stop_token_ids=[0, 99]
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 32 + "a" + ")" * 32,
        "[(((((((((((((((((((((((((((((((((((((((((((((((((((]",
        r"\(\(" * 40,
        "a{1000}",
        "a{0,100000}",
        ".*" * 500,
        r"(?i)\b(?:stop|end)\b(?!\w)",
        "(?P<q>['\"]).*?(?P=q)",
    ],
)
def test_ordinary_patterns_pass(pattern: str) -> None:
    check(stop_regex=pattern)


def test_patterns_are_not_compiled_when_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs on the event loop."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("re._compiler.compile" if sys.version_info >= (3, 11) else "sre_compile.compile", refuse)
    monkeypatch.setattr("regex.compile", refuse)
    check(stop_regex="[a-z]+q{3}(x|y)")


def test_spellings() -> None:
    assert check(stop="a").stop == ["a"]
    assert check(stop=["", "a"]).stop == ["a"]
    assert check(stop_regex="a+").stop_regex == ["a+"]
    assert check(json_schema={"type": "object"}).json_schema == '{"type": "object"}'
    assert check(logit_bias={5: 1}).logit_bias == {"5": 1.0}


def test_precedence_is_request_server_model_defaults() -> None:
    model = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    server = {"top_p": 0.8, "top_k": 10}
    params = merge({"top_k": 5}, model, server)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.8, 5, 0.0)


def test_null_means_not_given_except_for_the_length() -> None:
    params = merge({"temperature": None, "stop": None, "max_new_tokens": None}, {"temperature": 0.6})
    assert (params.temperature, params.stop, params.max_new_tokens) == (0.6, [], None)
    assert merge({}).max_new_tokens == 128


def test_top_k_of_zero_in_generation_config_means_all() -> None:
    assert merge({}, {"top_k": 0}).top_k == -1
