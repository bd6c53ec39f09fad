"""The cases of `scripts/first_hour.py`, and what it says of servers."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands.configs import checkpoint
from commands.cut import cut, most_layers, write_cut
from docs.recipes import CONFIGS
from live_server import PYTHON_ROOT
from transformers import PreTrainedTokenizerFast

from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.managers.front.media.media_tokens import media_tokens
from sglang.srt.plan.model_description import describe_model
from sglang.srt.towers.pictures.processor_files import read_processor_files
from sglang.srt.utils.token_texts import read_text_numbers


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hour", Path(PYTHON_ROOT).parent / "scripts" / "first_hour.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["first_hour"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def few(script: ModuleType) -> list[Any]:
    return list(script.cases_of(every=False))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_every_case_has_a_plan_on_one_card(script: ModuleType, few: list[Any], every: bool) -> None:
    """A case that is refused would say nothing of a GPU. `make test` plans every third."""
    cases = script.cases_of(every) if every else few
    assert len({case.name for case in cases}) == len(cases) > 60
    for case in cases if every else cases[::3]:
        assert script.planned(case, "h200" if every else "sm_120") is not None, case.name


def test_each_architecture_has_a_recipe(script: ModuleType, few: list[Any]) -> None:
    assert {script.architecture(case) for case in few if case.kind == "recipe"} == {
        script.architecture(script.Case("", config)) for config in CONFIGS.values()
    }
    assert {case.kind for case in few} == {"embedded", "recipe", "drafts", "published"}


@pytest.mark.parametrize("name", sorted(set(CONFIGS.values())))
def test_the_first_layers_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """Of every kind that the model has, and as wide; what lies beside them is what a server reads. Of Ling 3.0 the
    activations of the last layers have limits, for which the shared expert stays apart in all of them."""
    source = checkpoint(name, tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    whole = describe_model(config, None)
    short = describe_model(cut(config), None, whole.shared_apart or "")
    assert short.layers == whole.layers[: len(short.layers)] and len(short.layers) <= 8
    kinds = {(layer.mixer, layer.ffn) for layer in whole.layers}
    assert len(short.layers) == most_layers(config) or {(layer.mixer, layer.ffn) for layer in short.layers} == kinds
    folder = write_cut(source, tmp_path / "cut")
    tokens = media_tokens(config)
    if tokens is not None:
        read_processor_files(folder, tokens.family, "{}", config)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        assert tokenizer.convert_ids_to_tokens(tokens.image) == (tokens.image_text or "<|image_pad|>")


@pytest.mark.parametrize("name", ["DeepSeek-V4.1-Flash", "qwen38_flash_next_nvfp4"])
def test_tables_of_n_grams_fit_a_plain_host(name: str, tmp_path: Path) -> None:
    folder = write_cut(checkpoint(name, tmp_path / "whole"), tmp_path / "cut")
    layers = describe_model(json.loads((folder / "config.json").read_text()), None, False).layers
    tables = [table for layer in layers if isinstance(table := layer.ngrams, NgramEmbedding)]
    assert tables and sum(table.rows * table.dim for table in tables) < 1 << 30
    for table in tables:
        if isinstance(table, Engram):
            read_text_numbers(str(folder), table.vocab_size, table.num_texts)


def test_flags_of_a_layout_are_left_out(script: ModuleType) -> None:
    words = [
        "--tp",
        "8",
        "--ep-size=4",
        "--context-length",
        "9",
        "--enable-dp-attention",
        "--mem-fraction-static",
        "0.9",
    ]
    assert script.on_one_gpu(words) == ("--context-length", "9")


@pytest.mark.parametrize(
    ("log", "problems"),
    [
        ("The server is fired up\n", 0),
        ("[t] Traceback (most recent call last):\n  File\n", 1),
        ("decode_kernel was compiled while requests waited: 0.30 s\n", 1),
        ("decode_kernel was read from Triton's cache while requests waited: 4 ms\n", 1),
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 3 errors\n", 1),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 1),
    ],
)
def test_what_no_owner_should_read(script: ModuleType, log: str, problems: int) -> None:
    assert len(script.log_problems(log)) == problems


def test_a_server_is_started_asked_and_ended(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where nothing differs but the time that it takes; and one that does not start."""
    monkeypatch.setattr(script, "REQUESTS", 4)
    case = script.Case("embedded", "")
    result = script.Result(case)
    until = script.time.monotonic() + 300
    flags = [*script.command_flags(case, tmp_path), "--device", "cpu"]
    script.play(result, flags, "", tmp_path / "log", "", until)
    assert result.reached and not result.problems, result.row() + (tmp_path / "log").read_text()
    refused = script.Result(case)
    script.play(refused, ["--no-such-flag"], "", tmp_path / "log", "", until)
    assert refused.reached and refused.problems == ["start ended with 2"]


def test_each_server_has_a_gpu_with_room(script: ModuleType) -> None:
    memory = script.Memory({"3": 100, "5": 120})
    now = script.time.monotonic()
    assert memory.largest == 120
    assert [memory.take(60, now) for _ in range(4)] == ["5", "3", "5", None]
    memory.give_back("3", 60)
    assert memory.take(61, now) == "3"


def test_a_large_server_that_has_waited_is_passed_no_more(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, far = script.Memory({"0": 100}), script.time.monotonic() + 300
    assert memory.take(30, far) == "0"
    large = threading.Thread(target=memory.take, args=(90, far), daemon=True)
    large.start()
    while not memory.waiting:
        script.time.sleep(0.01)
    assert memory.take(30, script.time.monotonic()) == "0"
    monkeypatch.setattr(script, "PATIENCE_S", 0.0)
    assert memory.take(30, script.time.monotonic()) is None
    memory.give_back("0", 60)
    large.join(300)
    assert memory.free == {"0": 10} and not memory.waiting


def test_an_answer_that_is_cut_off_is_a_problem_of_its_case(script: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_half() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # a connection closed over unread bytes is reset, and the answer lost
                    pass

        thread = threading.Thread(target=answer_half)
        thread.start()
        server = object.__new__(script.Server)
        server.port = listener.getsockname()[1]
        assert server.ask(0, 10.0).startswith("IncompleteRead")
        thread.join()
