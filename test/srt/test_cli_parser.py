"""The options in parsers of other programs: scripts written for SGLang, and trainers that give them a prefix."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from sglang.srt.cli_parser import destination
from sglang.srt.errors import UserError
from sglang.srt.server_args import TABLE, ServerArgs

WORDS = (
    "--model-path m --tp 2 --cuda-graph-bs 1 2 4 --random-seed 3 --max-total-tokens 2k --trust-remote-code "
    '--kv-cache-dtype fp8 --json-model-override-args {"rope_theta":1}'
).split()


def script_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    ServerArgs.add_cli_args(parser)
    return parser


def test_the_same_arguments_as_by_the_command_line() -> None:
    parsed = script_parser().parse_args([*WORDS, "--rounds", "5"])
    assert parsed.rounds == 5 and parsed.tensor_parallel_size == 2
    assert ServerArgs.from_cli_args(parsed) == ServerArgs.from_cli(WORDS)


def test_values_are_checked_together() -> None:
    with pytest.raises(UserError, match="--model-path is required"):
        ServerArgs.from_cli_args(argparse.Namespace())
    words = "--model-path m --enable-hierarchical-cache --disable-radix-cache".split()
    with pytest.raises(UserError, match="--disable-radix-cache"):
        ServerArgs.from_cli_args(script_parser().parse_args(words))


def test_the_namespace_has_typed_values_and_defaults() -> None:
    parsed = vars(script_parser().parse_args(["--random-seed", "1", "--model-path", "m"]))
    values = {name: parsed[destination(TABLE, name)] for name in TABLE.fields}
    assert ServerArgs(**values) == ServerArgs(model_path="m", random_seed=1)


def test_another_spelling_of_a_release() -> None:
    assert script_parser().parse_args("--model-path m --cuda-graph-max-bs-decode 8".split()).cuda_graph_max_bs == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port x", "--port: expected an integer; got 'x'"),
        ("--tp 0", "--tp-size: must be at least 1"),
        ("--cuda-graph-bs 1 y", "expected an integer; got 'y'"),
        ("--disaggregation-mode prefill", "--disaggregation-mode is not implemented in sm120-sglang"),
        ("--enable-deepep-moe", "--enable-deepep-moe is not implemented in sm120-sglang"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    with pytest.raises(SystemExit):
        script_parser().parse_args(f"--model-path m {words}".split())
    assert message in capsys.readouterr().err


def test_what_asks_for_nothing_passes() -> None:
    assert script_parser().parse_args("--model-path m --disaggregation-mode null --rounds 3".split()).rounds == 3


def test_every_flag_of_sglang_is_known() -> None:
    assert TABLE.meanings.keys() <= script_parser()._option_string_actions.keys()


def test_a_trainer_gives_the_options_a_prefix() -> None:
    """As slime and miles do: they replace `add_argument`, leave out what they set themselves, and look for the sizes
    under SGLang's long names."""
    parser = argparse.ArgumentParser()
    add_argument = parser.add_argument

    def prefixed(*flags: str, **settings: Any) -> None:
        if settings["dest"] not in {"model_path", "random_seed"}:
            names = [f"--sglang-{each.lstrip('-')}" for each in flags]
            add_argument(*names, **settings | {"dest": f"sglang_{settings['dest']}"})

    parser.add_argument = prefixed  # type: ignore[assignment, method-assign]
    ServerArgs.add_cli_args(parser)
    words = "--sglang-mem-fraction-static 0.7 --sglang-data-parallel-size 2 --sglang-ep 1"
    parsed = parser.parse_args(words.split())
    parsed.sglang_dp_size = parsed.sglang_data_parallel_size
    values = {"model_path": "m", "random_seed": 3}
    for field in dataclasses.fields(ServerArgs):
        if hasattr(parsed, f"sglang_{field.name}") and field.name not in values:
            values[field.name] = getattr(parsed, f"sglang_{field.name}")
    assert ServerArgs(**values) == ServerArgs(model_path="m", random_seed=3, mem_fraction_static=0.7, dp_size=2)
