"""Reads the blocks with which a block draft was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.speculative import DFLASH, DSPARK, USUAL_BLOCK_SIZE
from sglang.srt.drafts.block.readers.dflash import dflash_first_row, dflash_rows
from sglang.srt.drafts.block.readers.dspark import block_rows, dspark_keys, first_row
from sglang.srt.drafts.block.readers.speculators import plain_values
from sglang.srt.drafts.config import BUNDLED_SIZE, config_keys, dspark_folder
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class TrainedBlock:
    """The rows of a block, and the draft tokens that they make."""

    rows: int
    draft_tokens: int


def trained_block(args: ServerArgs) -> TrainedBlock:
    """Returns the block with which the draft of the flags was trained; 0 rows for drafters without blocks. Raises
    UserError for a missing draft."""
    path = args.speculative_draft_model_path
    if args.speculative_algorithm == DFLASH:
        if path is None:  # refused with the other flags
            return TrainedBlock(USUAL_BLOCK_SIZE, USUAL_BLOCK_SIZE - 1)
        keys = _plain(config_keys(_resolved(args)), DFLASH)
        rows = dflash_rows(keys)
        return TrainedBlock(rows, rows - dflash_first_row(keys))
    if args.speculative_algorithm != DSPARK:
        return TrainedBlock(0, 0)
    folder = _resolved(args)
    keys = config_keys(folder, None if path is not None else args.model_overrides())
    inside = dspark_folder(folder, keys, path is not None)
    keys = keys if inside == folder else config_keys(inside)
    if keys.values.get(BUNDLED_SIZE) is not None:
        rows = keys.positive(BUNDLED_SIZE)
        return TrainedBlock(rows, rows)
    keys = dspark_keys(_plain(keys, DSPARK))
    rows = block_rows(keys)
    return TrainedBlock(rows, rows - first_row(keys))


def _plain(keys: ConfigReader, algorithm: str) -> ConfigReader:
    return ConfigReader(plain_values(keys.values, algorithm, keys.source), keys.source)


def _resolved(args: ServerArgs) -> Path:
    path, flag = args.speculative_draft_model_path, "--speculative-draft-model-path"
    if path is None:
        return resolve_model_path(args.model_path, args.revision, args.download_dir, False)
    return resolve_model_path(path, args.speculative_draft_model_revision, args.download_dir, False, flag)
