"""The table of what goes together: every refusal is one of flags, and the page on several GPUs has the table."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sglang.srt.composition import FEATURES, REFUSED, refusal, table
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
WORDS = {
    "tp": "--tp 4",
    "ep": "--tp 4 --ep-size 2",
    "pp": "--pp-size 2",
    "dcp": "--tp 4 --dcp-size 2",
    "groups": "--tp 4 --attn-dp-size 2",
    "replicas": "--dp-size 2",
    "machines": "--tp 4 --nnodes 2 --node-rank 0 --dist-init-addr host:1",
    "ray": "--use-ray",
    "drafts": "--speculative-algorithm NGRAM",
    "texts": "--speculative-algorithm NGRAM --speculative-ngram-external-corpus-path /tmp",
    "host": "--enable-hierarchical-cache",
    "store": "--enable-hierarchical-cache --hicache-storage-backend file",
    "encoders": "--tp 4 --mm-enable-dp-encoder",
}
"""Flags that ask for each feature but images, which depend on the model."""


def words_of(*names: str) -> list[str]:
    """The flags of several features, each once."""
    flags: dict[str, list[str]] = {}
    for name in names:
        for part in f" {WORDS[name]}".split(" --")[1:]:
            flag, *values = part.split()
            flags[flag] = [f"--{flag}", *values]
    return ["--model-path", "x", *itertools.chain.from_iterable(flags.values())]


PAIRS = [pair for pair in itertools.combinations(WORDS, 2) if pair != ("machines", "ray")]
"""With Ray machines are a part of it."""


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_flags_of_two_features(one: str, other: str) -> None:
    why = refusal(one, other)
    if why is not None:
        with pytest.raises(UserError, match="does not go with"):
            ServerArgs.from_cli(words_of(one, other))
    else:
        args = ServerArgs.from_cli(words_of(one, other))
        assert FEATURES[one].asked(args) and FEATURES[other].asked(args)


def test_what_is_refused_is_between_features() -> None:
    assert all({one, other} <= FEATURES.keys() and one != other for one, other in REFUSED)
    assert not any((other, one) in REFUSED for one, other in REFUSED)
    assert set(WORDS) == FEATURES.keys() - {"images"}


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "put what sglang.srt.composition.table() returns into docs/parallelism.md"
