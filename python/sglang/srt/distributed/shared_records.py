"""The measured times that all ranks plan with: those of the first rank, if all GPUs have its setting.

Ranks must launch the same kernels with the same tiles, so that each reading its own file would not do: another server
may be writing it, and machines have caches of their own.
"""

from __future__ import annotations

import logging

import msgspec

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.agreement import gather_from_ranks
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.measured.records import Setting, by_key, from_bytes, to_bytes
from sglang.srt.kernels.measured.setting import SettingOf, records_here, setting_here

logger = logging.getLogger(__name__)


def shared_choices(gpu: int, setting_of: SettingOf = setting_here) -> MeasuredChoices:
    """Returns what was measured on GPUs like this rank's, equal on all ranks. gpu: its CUDA device. `setting_of`:
    replaced by tests. A collective."""
    mine, records = records_here(gpu, setting_of) if parallel_state.is_leader() else (None, {})
    if parallel_state.num_ranks() == 1:
        return MeasuredChoices.of(records)
    first = gather_from_ranks(b"" if mine is None else to_bytes(mine, records))[0]
    if not first:
        return NOT_MEASURED
    file = from_bytes(first)
    mine = mine or setting_of(gpu)
    from_all = gather_from_ranks(msgspec.json.encode(mine))
    if any(msgspec.json.decode(each, type=Setting | None) != file.setting for each in from_all):
        if parallel_state.is_leader():
            logger.warning(
                "What was measured on this machine is not used: drivers, clocks or packages of the GPUs differ"
            )
        return NOT_MEASURED
    return MeasuredChoices.of(by_key(file))
