"""Prompts for benchmarks: sharegpt, random, random-ids, generated-shared-prefix."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class BenchTokenizer(Protocol):
    """The tokenizer interface that datasets need."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Returns the ids of special tokens, which random prompts leave out."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `ids` are sent to endpoints that take token ids, `text` to those that take text; at least one is
    given."""

    text: str | None
    ids: list[int] | None
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetArgs:
    """The dataset flags of the command line."""

    name: str = "random"
    path: str | None = None
    num_prompts: int = 1000
    seed: int = 1
    as_ids: bool = True
    """Prompts go out as token ids."""
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256


class DatasetError(ValueError):
    """Raised when the dataset that the user named cannot be used; the message says why."""


def make_prompts(args: DatasetArgs, tokenizer: BenchTokenizer) -> list[Prompt]:
    """Returns the prompts of one run, the same for the same arguments. Raises DatasetError."""
    if args.name not in DATASETS:
        raise DatasetError(f"unknown dataset {args.name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[args.name](args, tokenizer, np.random.default_rng(args.seed))


def _length(rng: np.random.Generator, longest: int, range_ratio: float, count: int) -> list[int]:
    """Returns lengths uniform in [range_ratio * longest, longest], at least 1."""
    if not 0 <= range_ratio <= 1:
        raise DatasetError(f"--random-range-ratio must be in [0, 1], got {range_ratio}")
    lengths: list[int] = rng.integers(max(1, int(longest * range_ratio)), longest + 1, count).tolist()
    return lengths


def _ordinary_ids(tokenizer: BenchTokenizer) -> npt.NDArray[np.int64]:
    """Returns ids of ordinary tokens: a random end-of-text or image token would change the measurement."""
    return np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))


def _prompt_of_ids(ids: list[int], output_len: int, as_ids: bool, tokenizer: BenchTokenizer) -> Prompt:
    if as_ids:
        return Prompt(None, ids, len(ids), output_len)
    # Text of random ids seldom encodes to the same ids; cut it so that it is at least not longer than asked for.
    text = tokenizer.decode(tokenizer.encode(tokenizer.decode(ids))[: len(ids)])
    return Prompt(text, None, len(tokenizer.encode(text)), output_len)


def _random_ids(args: DatasetArgs, tokenizer: BenchTokenizer, rng: np.random.Generator) -> list[Prompt]:
    vocabulary = _ordinary_ids(tokenizer)
    inputs = _length(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    outputs = _length(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    return [
        _prompt_of_ids(rng.choice(vocabulary, n).tolist(), m, args.as_ids, tokenizer)
        for n, m in zip(inputs, outputs, strict=True)
    ]


def _random(args: DatasetArgs, tokenizer: BenchTokenizer, rng: np.random.Generator) -> list[Prompt]:
    """Returns real text (of --dataset-path) cut or repeated to random lengths."""
    if args.path is None:
        print("random: no --dataset-path given, so prompts are random token ids")
        return _random_ids(args, tokenizer, rng)
    conversations = _conversations(args.path)
    rng.shuffle(conversations)
    inputs = _length(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    outputs = _length(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    prompts: list[Prompt] = []
    for i, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
        ids = tokenizer.encode(conversations[i % len(conversations)][0]) or [0]
        ids = (ids * -(-input_len // len(ids)))[:input_len]
        prompts.append(_prompt_of_ids(ids, output_len, args.as_ids, tokenizer))
    return prompts


def _sharegpt(args: DatasetArgs, tokenizer: BenchTokenizer, rng: np.random.Generator) -> list[Prompt]:
    if args.path is None:
        raise DatasetError("the sharegpt dataset needs --dataset-path FILE (ShareGPT JSON); it is not downloaded")
    conversations = _conversations(args.path)
    rng.shuffle(conversations)
    prompts: list[Prompt] = []
    for question, answer in conversations:
        if len(prompts) == args.num_prompts:
            break
        ids = tokenizer.encode(question)
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer))
        if len(ids) < 2 or output_len < 2:
            continue
        if args.sharegpt_context_len is not None and len(ids) + output_len > args.sharegpt_context_len:
            continue
        prompts.append(Prompt(question, ids if args.as_ids else None, len(ids), output_len))
    if not prompts:
        raise DatasetError(f"{args.path} has no conversation that could be used")
    return prompts


def _conversations(path: str) -> list[tuple[str, str]]:
    """Returns (first question, first answer) of each conversation with at least two turns. Raises DatasetError.

    The file is ShareGPT's JSON, or JSON lines: of such conversations, or of questions with answers as in
    benchmark/evals and GSM8K (`question`, `answer`).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = text.lstrip().startswith("{")
        rows = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
        pairs = [_pair(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path} is not a ShareGPT file, nor JSON lines of questions: {error!r}") from None
    conversations = [pair for pair in pairs if pair is not None]
    if not conversations:
        raise DatasetError(f"{path} has no conversation with two turns")
    return conversations


def _pair(row: dict[str, Any]) -> tuple[str, str] | None:
    if "question" in row:
        return str(row["question"]), str(row["answer"])
    turns = row.get("conversations") or row.get("conversation") or []
    return (str(turns[0]["value"]), str(turns[1]["value"])) if len(turns) >= 2 else None


def _shared_prefix(args: DatasetArgs, tokenizer: BenchTokenizer, rng: np.random.Generator) -> list[Prompt]:
    """Returns groups of prompts, each of which begins with the group's system prompt, in random order."""
    vocabulary = _ordinary_ids(tokenizer)
    prompts: list[Prompt] = []
    for _ in range(args.gsp_num_groups):
        system = rng.choice(vocabulary, args.gsp_system_prompt_len).tolist()
        system_text = tokenizer.decode(system)
        for _ in range(args.gsp_prompts_per_group):
            question = rng.choice(vocabulary, args.gsp_question_len).tolist()
            if args.as_ids:
                prompts.append(_prompt_of_ids(system + question, args.gsp_output_len, True, tokenizer))
            else:
                text = f"{system_text}\n\n{tokenizer.decode(question)}"
                prompts.append(Prompt(text, None, len(tokenizer.encode(text)), args.gsp_output_len))
    order = rng.permutation(len(prompts))
    return [prompts[i] for i in order]


DATASETS: Mapping[str, Callable[[DatasetArgs, BenchTokenizer, np.random.Generator], list[Prompt]]] = {
    "sharegpt": _sharegpt,
    "random": _random,
    "random-ids": _random_ids,
    "generated-shared-prefix": _shared_prefix,
}
