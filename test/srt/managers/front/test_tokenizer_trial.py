"""Tokenizers that crash, multiply or hang are refused by the name of what does, before a process of the server has
read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_servers import forked_children

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.text_encoder import TextEncoder
from sglang.srt.managers.front.tokenizer_trial import TokenizerTrial
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

OWN = json.loads((Path(DEFAULT_MODEL_PATH) / "tokenizer.json").read_text())
BYTES = OWN["pre_tokenizer"]["pretokenizers"][1]

Write = Callable[..., ServerArgs]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    def tokenizer(**keys: Any) -> ServerArgs:
        (tmp_path / "tokenizer.json").write_text(json.dumps(OWN | keys))
        return ServerArgs.from_kwargs(model_path=str(tmp_path))

    with forked_children():
        yield tokenizer


def split(pattern: str) -> dict[str, Any]:
    own = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [own, BYTES]}


def replaced(pattern: str, content: str, kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


RARE = "\u2603"


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"pre_tokenizer": split("(a+)+$")}, "tokenizer.json, pre_tokenizer: .*retry-limit"),
        ({"pre_tokenizer": split("(")}, "tokenizer.json: .*parenthesis"),
        ({"normalizer": replaced("x", "y" * 1000)}, "tokenizer.json, normalizer: .*it makes 64000 characters of 64"),
        ({"normalizer": replaced(RARE, "y" * 1000, "String")}, "tokenizer.json, normalizer: .*it makes 64000"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replaced(".", "y" * 10)] * 3}},
            "tokenizer.json, normalizer: .*it makes 64000 characters",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replaced(".", "y" * 99)] * 9}},
            "tokenizer.json, normalizer",
        ),
        ({"normalizer": replaced("", "y")}, "tokenizer.json, (pre_tokenizer|model): .*index out of bounds"),
        ({"model": {"type": "none"}}, "tokenizer.json"),
    ],
)
def test_what_fails_is_refused_by_its_name(write: Write, keys: dict[str, Any], part: str) -> None:
    trial = TokenizerTrial(write(**keys), working_bytes=1 << 30, limit_s=10.0)
    with pytest.raises(UserError, match=part) as refused:
        trial.check()
    assert "--tokenizer-path" in str(refused.value)


@pytest.mark.parametrize(
    "normalizer", [None, {"type": "NFKC"}, {"type": "Prepend", "prepend": "\u2581"}, replaced(" ", "\u2581", "String")]
)
def test_usual_rules_pass(write: Write, normalizer: dict[str, Any] | None) -> None:
    TokenizerTrial(write(normalizer=normalizer)).check()


def test_no_tokenizer_needs_no_trial(write: Write) -> None:
    args = write(pre_tokenizer=split("("))
    args.skip_tokenizer_init = True
    TokenizerTrial(args).check()


@pytest.mark.asyncio
async def test_a_pattern_that_gives_up_on_a_clients_text_refuses_that_text(write: Write) -> None:
    """Of a tokenizer that has passed: what is asked for is rarer than what is tried."""
    args = write(pre_tokenizer=split("(q+)+$"))
    tokenizer = load_tokenizer(args)
    assert tokenizer is not None
    encoder = TextEncoder(tokenizer, 1)
    assert await encoder.encode("hello")
    with pytest.raises(RequestError, match="The model's tokenizer fails on this text: .*retry-limit") as refused:
        await encoder.encode("q" * 40 + "!")
    assert refused.value.status_code == 400
    assert await encoder.encode("hello")
    encoder.close()


def test_a_decoder_that_panics_prints_a_replacement(write: Write) -> None:
    tokenizer = load_tokenizer(write())
    assert tokenizer is not None

    class PanicException(BaseException):
        pass

    class Rust:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            raise PanicException

    tokenizer._rust = Rust()  # type: ignore[assignment]
    assert tokenizer.decode([1, 2]) == "\ufffd"
