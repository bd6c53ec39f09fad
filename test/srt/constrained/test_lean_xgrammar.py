"""xgrammar without what it does not need: each import in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = """
import numpy, xgrammar
info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b""], xgrammar.VocabType.RAW, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema('{"type": "integer"}'))
mask = numpy.zeros((1, 9), numpy.int32)
matcher.fill_next_token_bitmask(mask[0])
xgrammar.BatchGrammarMatcher(max_threads=2).batch_fill_next_token_bitmask([matcher], mask, [0])
allowed = numpy.flatnonzero(numpy.unpackbits(mask.view(numpy.uint8), bitorder="little"))
assert bytes(allowed.astype(numpy.uint8)) == b"-0123456789", allowed
try:
    xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": {"type": "nothing"}})
except RuntimeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError("it took what is no tag")
"""


def modules_after(program: str) -> set[str]:
    """The modules that an interpreter has in the end."""
    last = "\nimport sys\nprint(*(name for name, module in sys.modules.items() if module is not None))"
    result = subprocess.run([sys.executable, "-c", program + last], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_it_works_without_torch_and_transformers() -> None:
    """With the installed version, so that one that needs them is noticed here."""
    lean = "from sglang.srt.constrained.lean_xgrammar import import_xgrammar\nimport_xgrammar(torch=False)"
    modules = modules_after(lean + USE)
    assert "xgrammar" in modules and not modules & {"torch", "transformers"}


def test_the_other_library_needs_neither() -> None:
    program = """
from pathlib import Path
from sglang.srt.constrained.grammar_backends import make_backend
make_backend("llguidance", Path()).import_library()
"""
    modules = modules_after(program)
    assert "llguidance" in modules and not modules & {"torch", "transformers", "xgrammar"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        'lean.TESTED = "0.1."',
        "lean._StandIn.__getattr__ = lambda self, name: 1 / 0",
        "lean._StandIn.__getattr__ = lambda self, name: (lambda: 1 / 0)() if name == 'LogitsProcessor' else object",
    ],
    ids=["another version", "nothing stands in", "one name does not"],
)
def test_a_version_that_needs_them_is_imported_with_them(change: str) -> None:
    program = f"import sglang.srt.constrained.lean_xgrammar as lean\n{change}\nlean.import_xgrammar(torch=False)\n"
    assert modules_after(program + USE) >= {"xgrammar", "torch", "transformers"}


@pytest.mark.thorough
def test_a_process_with_torch_keeps_it() -> None:
    """And imports transformers, the real one, when it needs it."""
    program = """
import torch
from sglang.srt.constrained.lean_xgrammar import import_xgrammar
import_xgrammar()
import sys
assert sys.modules["torch"] is torch and "transformers" not in sys.modules
from transformers import PreTrainedTokenizerFast
assert PreTrainedTokenizerFast.__module__.startswith("transformers.")
"""
    assert "transformers.tokenization_utils_base" in modules_after(program + USE)
