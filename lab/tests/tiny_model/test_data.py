"""Problems: right answers, a split without overlap, the same batches for the same seed."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import arithmetic, lookup
from tiny_model.heldout import all_items, every_held_out_fact, items, write, write_gsm8k
from tiny_model.mixture import TASK_NAMES, TASKS, Encoder, Shape, batch, draw
from tiny_model.problem import Problem, is_held_out, is_held_out_key, is_trainable
from tiny_model.render import answer_text, prompt_text, segments
from tiny_model.words import TALK, WORDS, facts
from tokenizers import Tokenizer

LAB = Path(__file__).parents[2]
DATA = Path(__file__).parents[3] / "benchmark" / "evals" / "data"
SMALL = Shape(short_rows=6, short_length=512, long_rows=1, long_length=2048)


@pytest.fixture(scope="module")
def encoder(files: Path) -> Encoder:
    return Encoder(Tokenizer.from_file(str(files / "tokenizer.json")))


@pytest.mark.parametrize("task", TASK_NAMES)
def test_no_problem_is_on_both_sides(task: str) -> None:
    rng = random.Random(1)
    count = 60 if "needle" in task else 300
    trained = {key for _ in range(count) for key in draw(task, rng).keys}
    for _ in range(count // 4):
        problem = draw(task, rng, held_out=True)
        assert problem.keys[-1] not in trained
        assert not is_trainable(problem)


def test_keys_leave_out_what_does_not_matter() -> None:
    assert arithmetic.pair_key("+", 15, 27) == arithmetic.pair_key("+", 27, 15)
    assert arithmetic.pair_key("+", 15, 27) != arithmetic.pair_key("-", 15, 27)
    rng = random.Random(0)
    keys: dict[str, set[str]] = {}
    for _ in range(4000):
        problem = arithmetic.add(rng)
        numbers = re.findall(r"\d+", problem.messages[0]["content"])
        keys.setdefault(" ".join(sorted(numbers, key=int)), set()).add(problem.keys[0])
    assert all(len(found) == 1 for found in keys.values())


def test_about_a_twelfth_is_held_out() -> None:
    share = sum(is_held_out_key(f"problem {i}") for i in range(12000)) / 12000
    assert 0.07 < share < 0.1


def test_one_digit_sums_are_always_trained() -> None:
    rng = random.Random(0)
    for a in range(10):
        for b in range(10):
            assert is_trainable(arithmetic.sum_of(rng, "add", a, b))
            assert not is_held_out(arithmetic.sum_of(rng, "add", a, b))


def asked(problem: Problem) -> str:
    text: str = problem.messages[-1]["content"]
    return text


@pytest.mark.parametrize("task", ["add", "subtract", "add_3_digits", "subtract_3_digits", "multiply"])
def test_arithmetic_is_right(task: str) -> None:
    rng = random.Random(2)
    for _ in range(300):
        problem = draw(task, rng)
        sides = problem.answer.split(" = ")
        values = {eval(side) for side in sides}
        assert len(values) == 1, problem.answer
        assert sorted(re.findall(r"\d+", sides[0])) == sorted(re.findall(r"\d+", asked(problem)))


def test_comparisons_are_right() -> None:
    rng = random.Random(3)
    for _ in range(300):
        problem = draw("compare", rng)
        a, word, b = re.fullmatch(r"(?:Yes, |No, )?(\d+) is (larger|smaller) than (\d+)\.", problem.answer).groups()  # type: ignore[union-attr]
        assert (int(a) > int(b)) == (word == "larger")
        question = asked(problem)
        if not question.startswith(("Is", a)):
            continue
        larger = any(sign in question for sign in ("greater", "larger", "more", ">"))
        first, second = map(int, re.findall(r"\d+", question))
        assert problem.answer.startswith("Yes" if (first > second) == larger else "No")


def test_word_problems_end_where_their_steps_lead() -> None:
    rng = random.Random(4)
    for _ in range(300):
        problem = draw("word_problem", rng)
        steps = [step.split(" = ") for step in problem.thought.split("\n")]
        assert len(steps) == 2
        for left, right in steps:
            assert eval(left) == int(right) >= 0
        assert steps[1][0].split()[0] == steps[0][1]
        assert problem.answer == f"The answer is {steps[1][1]}."
        assert problem.quiet_answer.endswith(problem.answer)


def test_lists_are_right() -> None:
    rng = random.Random(5)
    for _ in range(300):
        problem = draw("sort", rng)
        given, got = asked(problem).split(": ")[1].split(", "), problem.answer.split(", ")
        assert sorted(given) == sorted(got)
        key: Any = int if got[0].isdigit() else str
        down = "largest to" in asked(problem) or "descending" in asked(problem) or "largest first" in asked(problem)
        assert got == sorted(given, key=key, reverse=down)
        problem = draw("reverse", rng)
        if ": " in asked(problem) and "," in problem.answer:
            assert asked(problem).split(": ")[1].split(", ") == problem.answer.split(", ")[::-1]
        problem = draw("copy", rng)
        assert asked(problem).endswith(problem.answer)
        problem = draw("count", rng)
        if match := re.fullmatch(r'"(\w+)" appears (\d+) times?\.', problem.answer):
            listed = asked(problem).split(": ")[-1].split(", ")
            assert listed.count(match[1]) == int(match[2])


@pytest.mark.parametrize("task", ["needle_short", "needle_long", "needle_2k"])
def test_needles_are_in_the_text_once(task: str, encoder: Encoder) -> None:
    rng = random.Random(6)
    lengths = []
    for _ in range(40):
        problem = draw(task, rng)
        text = problem.messages[0]["content"]
        assert text.count(problem.answer) == 1
        owner = re.search(r" of (\w+) is ", problem.answer)[1]  # type: ignore[index]
        assert len(re.findall(rf" of {owner} is ", text)) == 1
        assert owner in asked(problem)
        lengths.append(len(encoder.document(problem, thinking=True).tokens))
    assert max(lengths) <= 2048
    if task == "needle_2k":
        assert min(lengths) > 1500


def test_token_estimate_is_close(encoder: Encoder) -> None:
    rng = random.Random(7)
    for _ in range(20):
        text = lookup.story_text(rng, 300)[0]
        real = len(encoder._tokenizer.encode(text).ids)
        assert 0.9 < lookup.count_tokens(text) / real < 1.1


def test_json_answers_follow_their_schema() -> None:
    rng = random.Random(8)
    types = {"string": str, "integer": int, "boolean": bool, "array": list}
    for _ in range(200):
        problem = draw("json", rng)
        schema = json.loads(re.search(r'\{"type": "object".*\]\}', asked(problem))[0])  # type: ignore[index]
        value = json.loads(problem.answer)
        assert list(value) == schema["required"] == list(schema["properties"])
        for name, part in value.items():
            assert type(part) is types[schema["properties"][name]["type"]]


@pytest.mark.parametrize("task", [name for name in TASK_NAMES if name.startswith("tool_") and name != "tool_answer"])
def test_calls_fit_the_offered_functions(task: str) -> None:
    rng = random.Random(9)
    for _ in range(100):
        problem = draw(task, rng)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in problem.tools}
        assert len(offered) == len(problem.tools)
        for call in problem.calls:
            parameters = offered[call["name"]]
            assert list(call["arguments"]) == parameters["required"]
            for name, value in call["arguments"].items():
                kind = parameters["properties"][name]
                assert type(value) is {"string": str, "integer": int}[kind["type"]]
                assert value in kind.get("enum", [value])
                assert str(value) in asked(problem)


def test_facts_and_talk_have_one_answer_a_question() -> None:
    questions: dict[str, str] = {}
    for name, table in facts().items():
        assert len(table["ask"]) == len(set(table["ask"])) >= 6, name
        for x, y in table["pairs"].items():
            for ask in table["ask"]:
                answer = table["answer"].format(x=x, y=y)
                assert questions.setdefault(ask.format(x=x), answer) == answer
    ways = [way.lower() for found in TALK.values() for way in found]
    assert len(ways) == len(set(ways))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_document_is_its_prompt_and_its_answer(task: str, thinking: bool) -> None:
    problem = draw(task, random.Random(10))
    whole = prompt_text(problem, thinking) + answer_text(problem, thinking)
    for last_only in (True, False):
        pieces = segments(problem, thinking, last_only=last_only)
        assert "".join(text for text, _ in pieces) == whole
        assert pieces[-1] == (answer_text(problem, thinking), True)
        assert not pieces[0][1]
    if problem.prompt:
        return
    assert prompt_text(problem, thinking).endswith("assistant\n" if thinking else "<think>\n\n</think>\n\n")
    assert ("<think>" in answer_text(problem, thinking)) == (thinking and bool(problem.thought))


def test_earlier_answers_count_where_they_are_alike(encoder: Encoder) -> None:
    rng = random.Random(11)
    problem = next(p for p in (draw("needle_short", rng) for _ in range(200)) if len(p.messages) > 3)
    written = [text for text, answer in segments(problem, thinking=True) if answer]
    assert len(written) == (len(problem.messages) + 1) // 2
    assert all(text.endswith("<|im_end|>") for text in written)
    assert len([text for text, answer in segments(problem, thinking=False) if answer]) == 1


def test_batches_depend_on_seed_and_step_alone(encoder: Encoder) -> None:
    first, again, other = (batch(encoder, SMALL, 5, step) for step in (3, 3, 4))
    for a, b, c in zip(first, again, other, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__slots__)
        assert not np.array_equal(a.tokens, c.tokens)
    assert not np.array_equal(first[0].tokens, batch(encoder, SMALL, 6, 3)[0].tokens)


def test_rows_are_full_and_marked(encoder: Encoder) -> None:
    for rows in batch(encoder, SMALL, 0, 0):
        used = rows.documents >= 0
        assert used.mean() > 0.8
        assert not rows.weights[~used].any()
        for row in range(len(rows.tokens)):
            starts = np.flatnonzero(rows.positions[row] == 0)
            for number in range(rows.documents[row].max() + 1):
                place = np.flatnonzero(rows.documents[row] == number)
                assert np.array_equal(place, np.arange(place[0], place[-1] + 1))
                assert place[0] in starts
                assert np.array_equal(rows.positions[row, place], np.arange(len(place)))
                weights = rows.weights[row, place]
                assert weights[0] == 0 and weights[-1] > 0
                total = float((weights.astype(np.float64)).sum())
                assert total == pytest.approx(np.sqrt((weights > 0).sum()), rel=1e-2)


def test_every_task_is_in_the_mixture(encoder: Encoder) -> None:
    seen: set[int] = set()
    for step in range(6):
        for rows in batch(encoder, Shape(24, 512, 4, 2048), 0, step):
            seen |= set(rows.tasks[rows.documents >= 0].tolist())
    assert seen == set(range(len(TASKS)))


def test_held_out_problems_are_the_same_in_another_process() -> None:
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from tiny_model.heldout import all_items\n"
        "print(json.dumps([item.as_dict() for item in all_items(3)]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    found = subprocess.run(
        [sys.executable, "-c", script, str(LAB)], capture_output=True, check=True, text=True, env=environment
    )
    assert json.loads(found.stdout) == [item.as_dict() for item in all_items(3)]


def test_held_out_problems_are_different_ones() -> None:
    for task in TASK_NAMES:
        if "needle" not in task:
            found = items(task, 30)
            assert len({item.problem.prompt or json.dumps(item.problem.messages) for item in found}) == 30
            assert {item.thinking for item in found} == {True, False}


def test_every_held_out_fact_is_there_once() -> None:
    asked = [item.problem.messages[0]["content"] for item in every_held_out_fact()]
    assert len(asked) == len(set(asked))
    ways = sum(len(table["ask"]) * len(table["pairs"]) for table in facts().values())
    assert len(asked) == pytest.approx(ways / 12, rel=0.2)
    rng = random.Random(0)
    for _ in range(20):
        question = draw("facts", rng, held_out=True).messages[0]["content"]
        assert any(whole[1:-1] in question for whole in asked), "an opening or an end may differ"


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="no such tasks: juggling; there are add"):
        list(all_items(1, ("juggling",)))


def test_held_out_problems_are_what_ships(tmp_path: Path) -> None:
    shipped = DATA / "tiny_problems.jsonl.gz"
    write(tmp_path / shipped.name, all_items(50))
    made, kept = (gzip.decompress((folder / shipped.name).read_bytes()) for folder in (tmp_path, DATA))
    assert made == kept


def test_synthetic_gsm8k_is_what_ships(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "made.jsonl", 205)
    shipped = DATA / "gsm8k_synthetic.jsonl"
    assert (tmp_path / "made.jsonl").read_text() == shipped.read_text()
    assert len({json.loads(line)["question"] for line in shipped.read_text().splitlines()}) == 205


def test_words_are_single_tokens(files: Path) -> None:
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    for word in WORDS:
        assert len(tokenizer.encode(word).ids) == len(tokenizer.encode(f" {word}").ids) == 1, word
