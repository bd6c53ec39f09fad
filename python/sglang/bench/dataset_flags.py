"""The command-line flags that choose a dataset, shared by the benchmarks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from sglang.bench.datasets import DATASETS, DatasetArgs


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of datasets to a parser."""
    data = parser.add_argument_group("dataset")
    data.add_argument("--dataset-name", choices=list(DATASETS), default="sharegpt")
    data.add_argument(
        "--dataset-path",
        help="A ShareGPT JSON file, or JSON lines of conversations or of question and answer (optional for random).",
    )
    data.add_argument("--num-prompts", type=int, default=1000)
    data.add_argument("--seed", type=int, default=1)
    data.add_argument("--random-input-len", "--random-input", type=int, default=1024)
    data.add_argument("--random-output-len", "--random-output", type=int, default=1024)
    data.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="Lengths are uniform in [ratio * len, len]. Default: 0."
    )
    data.add_argument("--sharegpt-output-len", type=int)
    data.add_argument("--sharegpt-context-len", type=int, help="Longer conversations are left out.")
    data.add_argument("--gsp-num-groups", type=int, default=64)
    data.add_argument("--gsp-prompts-per-group", type=int, default=16)
    data.add_argument("--gsp-system-prompt-len", type=int, default=2048)
    data.add_argument("--gsp-question-len", type=int, default=128)
    data.add_argument("--gsp-output-len", type=int, default=256)


def dataset_args(args: argparse.Namespace, as_ids: bool) -> DatasetArgs:
    """Returns the dataset of parsed flags. as_ids: prompts of random-ids are sent as token ids."""
    return DatasetArgs(
        name=args.dataset_name,
        path=args.dataset_path,
        num_prompts=args.num_prompts,
        seed=args.seed,
        as_ids=as_ids,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        random_range_ratio=args.random_range_ratio,
        sharegpt_output_len=args.sharegpt_output_len,
        sharegpt_context_len=args.sharegpt_context_len,
        gsp_num_groups=args.gsp_num_groups,
        gsp_prompts_per_group=args.gsp_prompts_per_group,
        gsp_system_prompt_len=args.gsp_system_prompt_len,
        gsp_question_len=args.gsp_question_len,
        gsp_output_len=args.gsp_output_len,
    )


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object, as an argparse type."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
