"""The real compile process with hostile grammars: each gets its answer, and the others do not notice."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tokenizers
from tokenizers import decoders

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.constrained.compile_client import CompileClient
from sglang.srt.constrained.compile_process import MIB, CompileLimits, Setup, Verdict
from sglang.srt.constrained.grammar import GrammarKey
from sglang.srt.constrained.vocabulary import write_vocabulary
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE

ANSWER_S = 300
CIRCLE = r"Circular \$ref chain"  # as xgrammar says it itself from 0.2.9 on
ENDLESS = GrammarKey("regex", "(a|b)*c?" * 30_000)
"""Takes a minute on an idle machine: the time is quadratic, 5.5 s for 9,000."""
GOOD = GrammarKey("regex", "[a-c]+")


def make_setup(vocabulary: Path, **limits: float) -> Setup:
    if not vocabulary.exists():
        write_vocabulary(vocabulary, TOKENIZER, VOCAB_SIZE, {EOS})
    return Setup(str(vocabulary), VOCAB_SIZE, [EOS], {}, 1, CompileLimits(**limits))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grammar") / "vocabulary.json"


@pytest.fixture(scope="module")
def client(vocabulary: Path) -> Iterator[CompileClient]:
    """Two places, and little time for those who keep others waiting."""
    client = CompileClient(make_setup(vocabulary, seconds=600, contended_seconds=1, places=2))
    yield client
    client.close()


def ask(client: CompileClient, key: GrammarKey) -> Verdict:
    return client.submit(key).verdict.result(ANSWER_S)


def children(client: CompileClient) -> list[psutil.Process]:
    assert client.process_id is not None
    return psutil.Process(client.process_id).children()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(ANSWER_S * 100):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_good_grammars_pass(client: CompileClient) -> None:
    verdict = ask(client, GOOD)
    assert verdict.error == "" and verdict.seconds > 0 and verdict.size_bytes > 0


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (GrammarKey("regex", "(ab"), "invalid regex: .*parenthesis"),
        (
            GrammarKey("ebnf", "root ::= root"),
            "No text satisfies the grammar: its rule 'root' needs itself without end.",
        ),
        (GrammarKey("json_schema", '{"$ref": "#"}'), rf"No text satisfies the grammar|{CIRCLE}"),
        (GrammarKey("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "only references inside of the schema"),
        (GrammarKey("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000), "nests 2001 objects"),
        (GrammarKey("json_schema", '{"enum": []}'), "invalid json_schema: enum array must not be empty"),
    ],
)
def test_bad_grammars_are_explained(client: CompileClient, key: GrammarKey, message: str) -> None:
    verdict = ask(client, key)
    assert verdict.status_code == 400
    assert re.search(message, verdict.error), verdict.error


def test_grammars_that_never_end_do_not_keep_others_waiting(client: CompileClient) -> None:
    endless = [client.submit(ENDLESS) for _ in range(5)]
    assert ask(client, GOOD).error == ""
    for check in endless[:3]:  # the last two have no one behind them
        verdict = check.verdict.result(ANSWER_S)
        # On a fast machine the memory may end before the second does.
        too_late = verdict.status_code == 503 and "more than 1 s to compile" in verdict.error
        assert too_late or "takes more than 1024 MiB" in verdict.error, verdict
    for check in endless[3:]:
        client.cancel(check)
    wait_until(lambda: not children(client))


def test_the_more_grammars_wait_the_less_time_each_has(vocabulary: Path) -> None:
    """Grammars that each may take long in a short queue do not keep others waiting for the sum of that."""
    client = CompileClient(make_setup(vocabulary, contended_seconds=600, max_wait_seconds=0.4, places=1))
    slow = [client.submit(GrammarKey("regex", ENDLESS.source + "d" * number)) for number in range(4)]
    assert ask(client, GOOD).error == ""
    for check in slow:
        verdict = check.verdict.result(ANSWER_S)
        assert "send it again when no others wait" in verdict.error and verdict.status_code == 503
    client.close()


def test_what_nobody_waits_for_ends_and_frees_its_memory(client: CompileClient) -> None:
    check = client.submit(ENDLESS)
    wait_until(lambda: len(children(client)) == 1)
    (child,) = children(client)
    client.cancel(check)
    wait_until(lambda: not child.is_running())
    assert not check.verdict.done()


def test_a_cancel_may_come_together_with_the_result(client: CompileClient) -> None:
    assert ask(client, GOOD).error == ""
    assert client.process_id is not None
    server = psutil.Process(client.process_id)
    check = client.submit(GrammarKey("regex", "(a|b)*c?" * 3000))
    wait_until(lambda: len(children(client)) == 1)
    server.suspend()
    (child,) = children(client)
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert not check.verdict.done(), "the grammar was compiled too soon for this test"
    client.cancel(check)
    client._sender.submit(lambda: None).result()  # one thread sends in order: the cancel has been sent
    server.resume()
    assert ask(client, GOOD).error == "" and client.process_id == server.pid


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 1.0, "memory_bytes": 8192 * MIB}, "The grammar took more than 1 s to compile; simplify it."),
        ({"memory_bytes": 16 * MIB}, "Compiling the grammar takes more than 16 MiB; simplify it."),
    ],
)
def test_limits_of_one_grammar_and_the_end_of_the_process(
    vocabulary: Path, limits: dict[str, float], message: str
) -> None:
    client = CompileClient(make_setup(vocabulary, **limits, result_bytes=2000))
    verdict = ask(client, ENDLESS)
    assert (verdict.error, verdict.status_code) == (message, 400)
    verdict = ask(client, GrammarKey("regex", "[a-c]{5}|x+y+z+"))
    assert "The compiled grammar takes" in verdict.error and verdict.status_code == 400
    assert client.process_id is not None
    process = psutil.Process(client.process_id)
    client.close()
    process.wait(ANSWER_S)


def test_a_child_that_crashes_fails_its_grammar_only(client: CompileClient) -> None:
    check = client.submit(ENDLESS)
    wait_until(lambda: len(children(client)) == 1)
    os.kill(children(client)[0].pid, 11)
    verdict = check.verdict.result(ANSWER_S)
    assert verdict.error == "The grammar ended its compiler (SIGSEGV); simplify it." and verdict.status_code == 400
    assert ask(client, GOOD).error == ""


def test_a_child_that_the_system_ends_says_nothing_about_its_grammar(client: CompileClient) -> None:
    check = client.submit(ENDLESS)
    wait_until(lambda: len(children(client)) == 1)
    children(client)[0].kill()
    verdict = check.verdict.result(ANSWER_S)
    assert "when memory is short; send the request again" in verdict.error and verdict.status_code == 503


def test_the_process_inherits_nothing_and_its_death_is_survived(client: CompileClient) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert ask(client, GOOD).error == ""
        assert client.process_id is not None
        first = psutil.Process(client.process_id)
        assert not first.net_connections("inet")
        targets = [os.readlink(f"/proc/{first.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{first.pid}/fd")]
        assert sum(target.startswith("socket:") for target in targets) == 1
        check = client.submit(ENDLESS)
        wait_until(lambda: len(children(client)) == 1)
        (child,) = children(client)
        first.kill()
        verdict = check.verdict.result(ANSWER_S)
        assert verdict.status_code == 500 and "died" in verdict.error
        wait_until(lambda: not child.is_running())
    assert ask(client, GOOD).error == "" and client.process_id != first.pid


def test_a_tokenizer_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path / "none.json"), 10, [], {"model_path": str(tmp_path)})
    client = CompileClient(setup)
    verdict = ask(client, GOOD)
    assert verdict.error.startswith("Grammars are not available: the tokenizer cannot be used for them")
    client.close()


def test_the_vocabulary_is_made_from_the_servers_tokenizer(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocabulary.json"
    client = CompileClient(Setup(str(vocabulary), 4096, [0], {"model_path": DEFAULT_MODEL_PATH}))
    client.start_ahead()
    wait_until(vocabulary.exists)
    process = client.process_id
    assert ask(client, GOOD).error == "" and client.process_id == process
    assert os.listdir(tmp_path) == ["vocabulary.json"]
    client.close()


@pytest.mark.thorough
def test_a_tokenizer_that_transformers_must_load_is_loaded(tmp_path: Path) -> None:
    """In the child, although the process itself keeps torch out."""
    assert TOKENIZER.rust is not None
    raw = tokenizers.Tokenizer.from_str(TOKENIZER.rust.to_str())
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    raw.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    setup = Setup(str(tmp_path / "vocabulary"), VOCAB_SIZE, [EOS], {"model_path": str(tmp_path)})
    client = CompileClient(setup)
    assert ask(client, GOOD).error == ""
    client.close()
    write_vocabulary(tmp_path / "expected", TOKENIZER, VOCAB_SIZE, {EOS})
    assert (tmp_path / "vocabulary").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (GOOD, "^$"),
        # Whichever limit it meets first; where memory ends, Rust ends the process.
        (ENDLESS, r"too complex|takes more than 1024 MiB|took more than 5 s|ended its compiler \(SIGABRT\)"),
        (GrammarKey("json_schema", '{"$ref": "#"}'), "No text satisfies the grammar: its rule '#' needs itself"),
        (GrammarKey("ebnf", 'start: "a" start'), "No text satisfies the grammar: its rule 'start' needs itself"),
        (GrammarKey("json_schema", '{"type": "array", "contains": {}}'), '"contains"'),
        (GrammarKey("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000), "nests 2001 objects"),
    ],
)
def test_the_other_library_has_the_same_limits(second_client: CompileClient, key: GrammarKey, message: str) -> None:
    verdict = ask(second_client, key)
    assert re.search(message, verdict.error, re.DOTALL), verdict
    assert verdict.error or verdict.size_bytes > 0


@pytest.fixture(scope="module")
def second_client(vocabulary: Path) -> Iterator[CompileClient]:
    setup = make_setup(vocabulary, seconds=5)
    setup.backend = "llguidance"
    client = CompileClient(setup)
    yield client
    client.close()
