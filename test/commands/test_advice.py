"""What messages advise is followed: a server with these flags would start, or have the larger cache."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from srt.kernels import published

from sglang import explain
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.server_args import ServerArgs

PRODUCTS = ("rtx-pro-6000-server", "rtx-5090", "gb10")
COUNTS = (1, 2, 4, 8)
CASES = list(itertools.product(published.every_name(), PRODUCTS, COUNTS))
IN_SHORT = [case for case in CASES if zlib.crc32(repr(case).encode()) % 40 == 0]
"""As many as CI has time for."""
PACKAGES = frozenset({"triton"})


def explained(model: str, product: str, flags: list[str], advises: bool = False) -> explain.Explanation | str:
    """Or the refusal of the command."""
    try:
        args = ServerArgs.from_cli(["--model-path", model, *flags])
        return explain.explain(args, arch_by_name(product), PACKAGES, advises=advises)
    except UserError as error:
        return str(error)


def advised(message: str) -> Iterator[list[str]]:
    """The flags of each way that `message` names; of a run of numbers its ends."""
    if "what works: " in message:
        for way in message.partition("what works: ")[2].split(" or "):
            if not way.startswith("--"):
                continue
            name, _, rest = way.partition(" ")
            numbers, *others = re.split(r" (?=--)", rest, maxsplit=1)
            for number in re.findall(r"\d+", numbers):
                yield [name, number, *(word for other in others for word in other.split())]
    for way in message.partition("What helps: ")[2].split(", or "):
        if words := re.findall(r"--[a-z0-9-]+ [\w.]+", way):
            yield [part.rstrip(".") for word in words for part in word.split()]


def tokens(found: explain.Explanation) -> int:
    return int(found.plan["max_total_num_tokens"]) if found.plan else 0


def follow(model: str, product: str, flags: list[str]) -> None:
    found = explained(model, product, flags, advises=True)
    if isinstance(found, str):
        reasons = ("not described here yet", "must ", "not supported", "brings its own Python code")
        assert any(reason in found for reason in reasons), found
        return
    for problem in filter(None, (found.refused, found.unfit)):
        for way in advised(problem):
            there = explained(model, product, [*flags, *way])
            assert not isinstance(there, str), f"{problem}\n{way}: {there}"
            assert there.refused is None and there.unfit is None, f"{problem}\n{way}: {there.refused or there.unfit}"
            assert tokens(there) > 0
    for note in found.notes:
        for way in advised(note):
            there = explained(model, product, [*flags, *way])
            assert not isinstance(there, str) and there.problem == found.problem, f"{note}\n{way}: {there}"
            if way[0] == "--context-length":
                assert tokens(there) >= int(way[1]), f"{note}\n{way}: {tokens(there)}"
            else:
                assert tokens(there) > tokens(found), f"{note}\n{way}: {tokens(there)}"


@pytest.mark.parametrize(("name", "product", "count"), IN_SHORT)
def test_advice_works_when_it_is_followed(name: str, product: str, count: int, tmp_path: Path) -> None:
    follow(str(published.any_checkpoint(name, tmp_path / "m")), product, ["--tp", str(count)])


@pytest.mark.thorough
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", published.every_name())
def test_all_advice_works(name: str, product: str, tmp_path: Path) -> None:
    model = str(published.any_checkpoint(name, tmp_path / "m"))
    for count in COUNTS:
        follow(model, product, ["--tp", str(count)])
    if product != "gb10":
        follow(model, product, ["--tp", "1", "--mem-fraction-static", "0.5"])
        follow(model, product, ["--tp", "2", "--max-running-requests", "2048", "--chunked-prefill-size", "16384"])
        follow(model, product, ["--tp", "32"])
