from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer
from sglang.srt.utils.tokenizer_files import TokenizerFiles

TEXT = "Hello wörld 😀 <|im_start|>user\n 1 + 1 = 2"


def load(directory: str | Path) -> Tokenizer:
    tokenizer = load_tokenizer(ServerArgs.from_kwargs(model_path=str(directory)))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(DEFAULT_MODEL_PATH) / name, tmp_path)
    return tmp_path


def test_agrees_with_transformers() -> None:
    tokenizer = load(DEFAULT_MODEL_PATH)
    assert tokenizer.encode(TEXT) == tokenizer.hf.encode(TEXT)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == tokenizer.hf.encode(TEXT, add_special_tokens=False)
    ids = tokenizer.encode(TEXT)
    for skip in (True, False):
        hf = tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip) == hf
    assert tokenizer.vocab_size == len(tokenizer.hf)
    assert tokenizer.eos_token_id == tokenizer.hf.eos_token_id
    assert tokenizer.chat_template == tokenizer.hf.chat_template


def test_does_not_import_transformers() -> None:
    code = (
        "import sys; from sglang.srt.server_args import ServerArgs;"
        "from sglang.srt.utils.hf_tokenizer import load_tokenizer;"
        f"t = load_tokenizer(ServerArgs.from_kwargs(model_path={DEFAULT_MODEL_PATH!r})); t.decode(t.encode('a'));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    tokenizer, lengths = load(DEFAULT_MODEL_PATH), []
    start = threading.Event()

    def encode() -> None:
        start.wait()
        lengths.append(len(tokenizer.encode("ab c" * 250_000)))

    thread = threading.Thread(target=encode)
    thread.start()
    start.set()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert lengths == [500_000] and turns > 20


def test_single_tokens() -> None:
    tokenizer = load(DEFAULT_MODEL_PATH)
    ids = tokenizer.encode("naïve 😀")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "naïve 😀".encode()
    assert "".join(map(tokenizer.token_text, tokenizer.encode("plain text"))) == "plain text"
    assert tokenizer.token_text(tokenizer.encode("<|im_end|>")[0]) == "<|im_end|>"


def test_ids_beyond_the_vocabulary_print_nothing() -> None:
    tokenizer = load(DEFAULT_MODEL_PATH)
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.vocab_size + 5]) == "ab"
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""


def test_truncation_in_tokenizer_json_is_ignored(directory: Path) -> None:
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    assert len(load(directory).encode("one two three four")) > 2


def test_tokens_that_only_the_config_knows_need_transformers(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    spec = json.loads((directory / "tokenizer.json").read_text())
    size = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
    config["added_tokens_decoder"] = {str(size): {"content": "<extra>", "special": True}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(directory)
    assert tokenizer.decode(tokenizer.encode("a<extra>b")) == "ab"


def test_several_chat_templates(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = load(directory).chat_template
    assert isinstance(template, dict)
    assert template["tool_use"] == "tools"
    assert "default" in template


def test_user_errors(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load(directory)
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="JSON object"):
        load(directory)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="--skip-tokenizer-init"):
        load(empty)
    (empty / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.Y", null]}}')
    with pytest.raises(UserError, match="--trust-remote-code"):
        load(empty)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"1": "a"}),
        ("added_tokens_decoder", [1]),
        ("chat_template", [{"name": "default"}]),
        ("chat_template", {"default": 1}),
        ("chat_template", 1),
    ],
)
def test_a_key_of_another_form_is_refused_by_its_name(directory: Path, key: str, value: object) -> None:
    (directory / "chat_template.jinja").unlink()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=key):
        load(directory)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_no_text_or_too_large_is_refused_by_its_name(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\xff")
    with pytest.raises(UserError, match=f"{name} is no text in UTF-8"):
        load(directory)
    with (directory / name).open("wb") as file:
        file.truncate(65 << 20)  # without blocks on the disk
    with pytest.raises(UserError, match=f"{name} has more than 64 MiB"):
        load(directory)


def test_no_tokenizer_wanted() -> None:
    assert load_tokenizer(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, skip_tokenizer_init=True)) is None


class PythonTokenizer:
    """Encodes a long text only after `RELEASED`."""

    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 10

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "long":
            STARTED.set()
            assert RELEASED.wait(20)
        return [len(text)]

    def decode(self, ids: list[int], **_: object) -> str:
        return "x" * len(ids)


STARTED, RELEASED = threading.Event(), threading.Event()


def test_the_event_loop_does_not_wait_for_a_thread_with_a_long_text() -> None:
    tokenizer = Tokenizer(TokenizerFiles(Path(), {}, {}, None), None, PythonTokenizer())
    tokenizer.copy_for_event_loop()

    async def main() -> None:
        long = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, "long"))
        assert await asyncio.to_thread(STARTED.wait, 20)
        assert tokenizer.encode("ab") == [2] and tokenizer.decode([1, 2]) == "xx" and not long.done()
        RELEASED.set()
        assert await long == [4]

    asyncio.run(main())
