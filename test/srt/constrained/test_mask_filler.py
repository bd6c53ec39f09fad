"""All masks of a step in one call: the same bits, and a request that takes long pays for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang.srt.constrained.grammar import Grammar, GrammarKey
from sglang.srt.constrained.grammar_backends import GrammarBackend, make_backend
from sglang.srt.constrained.mask_filler import METERED_FILLS, PROBE_EVERY, SLOW_FILL_S, MaskFiller
from sglang.srt.constrained.vocabulary import write_vocabulary
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE

WIDTH = -(-VOCAB_SIZE // 32)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    vocabulary: Path = tmp_path_factory.mktemp("grammar") / "vocabulary.json"
    write_vocabulary(vocabulary, TOKENIZER, VOCAB_SIZE, {EOS})
    made = make_backend(request.param, vocabulary)
    made.load()
    return made


def grammars(backend: GrammarBackend) -> list[Grammar]:
    """Of several forms, at several places; one is at its end."""
    made = []
    for kind, source, text in (("regex", "[a-c]+x", "ab"), ("ebnf", 'root ::= "yes" | "no"', "n"), ("regex", "a", "a")):
        for length in range(len(text) + 1):
            grammar = backend.compile(GrammarKey(kind, source)).fresh()  # type: ignore[arg-type]
            assert all(map(grammar.accept, TOKENIZER.encode(text[:length], add_special_tokens=False)))
            made.append(grammar)
    assert made[-1].accept(EOS) and made[-1].is_terminated()
    return made


class Clock:
    """Every reading is `step_s` after the one before."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.mark.parametrize(("step_s", "num_threads"), [(0.0, 1), (0.0, 3), (2 * SLOW_FILL_S, 1)])
def test_masks_are_those_of_each_grammar(backend: GrammarBackend, step_s: float, num_threads: int) -> None:
    filler, several = MaskFiller(num_threads, Clock(step_s)), grammars(backend)
    rows = [2 * i + 1 for i in range(len(several))]
    wanted = np.full((2 * len(several), WIDTH), -1, np.int32)
    for grammar, row in zip(several, rows, strict=True):
        grammar.fill_mask(wanted[row])
    for _ in range(3):
        mask = np.full_like(wanted, -1)
        filler.fill(several, mask, rows)
        assert (mask == wanted).all()
    for number in (0, 1):
        mask = np.full_like(wanted[:1], -1)
        filler.fill(several[:number], mask, [0] * number)
        assert (mask[0] == (wanted[1] if number else -1)).all()


def test_after_a_slow_step_each_request_is_charged_for_its_own(backend: GrammarBackend) -> None:
    clock = Clock(2 * SLOW_FILL_S)
    filler, several = MaskFiller(1, clock), grammars(backend)
    mask = np.full((len(several), WIDTH), -1, np.int32)
    charged: list[int] = []
    for _ in range(METERED_FILLS + 3):
        before = [grammar.allowance.left_s for grammar in several]
        filler.fill(several, mask, [*range(len(several))])
        charged.append(sum(g.allowance.left_s < left for g, left in zip(several, before, strict=True)))
    going_on = sum(not grammar.is_terminated() for grammar in several)
    assert charged == [0, *[going_on] * METERED_FILLS, 0, going_on]


class Library:
    """Takes a time that depends on the number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.calls: list[int] = []

    def fill_masks(self, matchers: list[object], mask: np.ndarray, rows: list[int], num_threads: int) -> None:
        self.calls.append(num_threads)
        self.now += self.seconds[num_threads]


def test_the_faster_number_of_threads_is_used_and_the_other_tried() -> None:
    library = Library({1: 0.001, 4: 0.0004})
    grammar = SimpleNamespace(
        is_terminated=lambda: False, matcher=None, compiled=library, mask_s=0.0, note_mask_time=lambda seconds: None
    )
    filler = MaskFiller(4, lambda: library.now)

    def steps(number: int) -> list[int]:
        library.calls.clear()
        for _ in range(number):
            filler.fill([grammar, grammar], np.zeros((2, 1), np.int32), [0, 1])  # type: ignore[list-item]
        return library.calls

    assert steps(PROBE_EVERY) == [1, *[4] * (PROBE_EVERY - 2), 1]
    library.seconds = {1: 0.0001, 4: 0.0004}  # other masks, or other programs use the processors
    assert steps(12 * PROBE_EVERY)[-PROBE_EVERY:] == [*[1] * (PROBE_EVERY - 1), 4]
