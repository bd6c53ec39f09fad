"""Ids of a text whose beginning was seen before are those of the whole text, and its beginning is not done again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.front import prefix_tokens
from sglang.srt.managers.front.prefix_tokens import PrefixTokens
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer

OWN = json.loads((Path(DEFAULT_MODEL_PATH) / "tokenizer.json").read_text())
END = "<|im_end|>"
FIRST_ONLY = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
ALWAYS = {**FIRST_ONLY, "prepend_scheme": "always"}
SPACED_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
FRAMED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
}


def added(content: str, number: int, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **plain, **flags}


def load(folder: Path, **keys: Any) -> Tokenizer:
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((Path(DEFAULT_MODEL_PATH) / name).read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps(OWN | keys))
    tokenizer = load_tokenizer(ServerArgs.from_kwargs(model_path=str(folder)))
    assert tokenizer is not None
    return tokenizer


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_chars = tokenizer, 0
        self.added_tokens, self.special_tokens = tokenizer.added_tokens, tokenizer.special_tokens
        self.chat_template = tokenizer.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        self.num_chars += sum(map(len, texts))
        return self.tokenizer.encode_each(texts)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tokens, "MIN_PIECE_CHARS", 16)


RULES: dict[str, dict[str, Any]] = {
    "own": {},
    "space before all": {"pre_tokenizer": SPACED_BYTES},
    "space before the first": {"pre_tokenizer": FIRST_ONLY},
    "space before each": {"pre_tokenizer": ALWAYS},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "x"}},
    "composed": {"normalizer": {"type": "NFKC"}},
    "stripped": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    "framed": {"post_processor": FRAMED},
    "longer tokens": {"added_tokens": [*OWN["added_tokens"], added("x<|im", 5001), added("<|im_start|>user", 5002)]},
    "greedy tokens": {"added_tokens": [*OWN["added_tokens"], added("<eats>", 5001, lstrip=True, rstrip=True)]},
    "an end that eats": {
        "added_tokens": [token | {"rstrip": token["content"] == END} for token in OWN["added_tokens"]]
    },
}
TOKENS = (END, "<|im_start|>", "x<|im_end|>", "<|im_start|>user", "<eats>", "<|", "|>")
PARTS = (*TOKENS, "user\n", " ", "\n", "x", "Hello wörld", "😀", "e\u0301", "123")


@pytest.mark.parametrize("rules", RULES)
def test_ids_are_those_of_the_whole_text(rules: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, **RULES[rules])
    prefixes, rng, text = PrefixTokens(tokenizer), random.Random(rules), ""
    for turn in range(400):
        text = "".join(rng.choices(PARTS, k=rng.randrange(12))) if turn % 20 == 0 else text
        text += "".join(rng.choices(PARTS, k=rng.randrange(12)))
        for special in (False, True):
            assert prefixes.encode(text, special) == tokenizer.encode(text, special), text
    assert prefixes.num_tokens


def turns(count: int) -> list[str]:
    """A conversation as it is sent each turn."""
    parts = [f"<|im_start|>user\n{'question ' * 50}{n}{END}\n" for n in range(count)]
    return ["".join(parts[: n + 1]) + "<|im_start|>assistant\n" for n in range(count)]


def test_what_was_seen_is_not_tokenized_again(tmp_path: Path) -> None:
    counting = Counting(load(tmp_path))
    prefixes = PrefixTokens(counting)  # type: ignore[arg-type]
    conversation = turns(40)
    counting.num_chars = 0
    for text in conversation:
        assert prefixes.encode(text, False) == counting.tokenizer.encode(text, False)
    assert counting.num_chars < 2 * len(conversation[-1]) < sum(map(len, conversation)) / 10


def test_two_conversations_share_their_beginning(tmp_path: Path) -> None:
    counting = Counting(load(tmp_path))
    prefixes = PrefixTokens(counting)  # type: ignore[arg-type]
    system = f"<|im_start|>system\n{'rule ' * 5000}{END}\n"
    prefixes.encode(system + turns(1)[0], False)
    counting.num_chars = 0
    prefixes.encode(system + "another" + turns(1)[0], False)
    assert counting.num_chars < 1000


def test_the_oldest_goes_first_and_ends_before_beginnings(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    prefixes = PrefixTokens(tokenizer, max_tokens=3000)
    for text in turns(60):
        assert prefixes.encode(text, False) == tokenizer.encode(text, False)
        assert prefixes.num_tokens <= 3000
    kept = len(prefixes._known(prefix_tokens._keys(text, prefixes._cuts(text))))
    assert kept == len(prefixes._pieces) > 10  # what is kept is a beginning
    prefixes.clear()
    assert prefixes.num_tokens == 0 and prefixes.encode(text, False) == tokenizer.encode(text, False)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    with pytest.raises((UnicodeEncodeError, TypeError)):
        PrefixTokens(load(tmp_path)).encode(turns(2)[1] + "\ud800", False)
    with pytest.raises((UnicodeEncodeError, TypeError)):
        PrefixTokens(load(tmp_path)).encode("\ud800" + turns(2)[1], False)


def test_several_threads(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    prefixes, texts = PrefixTokens(tokenizer, max_tokens=4000), turns(30)
    wanted = [tokenizer.encode(text, False) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert list(threads.map(lambda text: prefixes.encode(text, False), texts)) == wanted
    assert prefixes.num_tokens == sum(map(len, prefixes._pieces.values()))


def test_marks_are_found_wherever_a_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is searched in parts, so that no search holds up other threads for long."""
    known = PrefixTokens(load(tmp_path))
    rng = random.Random(5)
    pieces = ["<", "</", "<|im", END, "a", "</think>", "<think>", "</tool_call>"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(50)]
    for size in (1, 2, 7, 30):
        monkeypatch.setattr(prefix_tokens, "SEARCHED_CHARS", size)
        for text in texts:
            whole = [match.span() for match in known._pattern.finditer(text)]
            assert [match.span() for match in known._matches(text)] == whole
