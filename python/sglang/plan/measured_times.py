"""What was measured on a GPU, for commands that plan without a server."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.measured.records import by_key, from_bytes
from sglang.srt.kernels.measured.setting import records_here
from sglang.srt.server_args import ServerArgs


def measured_choices(args: ServerArgs, path: Path | None, here: bool) -> MeasuredChoices:
    """Returns the choices of a file, or without one those of this machine's GPU if the plan is for it (`here`). Raises
    UserError for a file that cannot be read."""
    if args.no_measured_choices:
        return NOT_MEASURED
    if path is None:
        of_gpu = here and envs.SGLANG_FORCE_ARCH is None
        return MeasuredChoices.of(records_here(args.base_gpu_id)[1]) if of_gpu else NOT_MEASURED
    try:
        return MeasuredChoices.of(by_key(from_bytes(path.read_bytes())))
    except (OSError, ValueError) as error:
        raise UserError(f"--measured {path}: {error}") from None
