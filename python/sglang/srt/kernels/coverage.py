"""Where SGLANG_CHECK_LAUNCHES went."""

from __future__ import annotations

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits


def check_launches(arch: ArchTraits) -> None:
    raise UserError(
        "SGLANG_CHECK_LAUNCHES is a command now: python -m sglang.ledger serve, with the flags of this server"
    )
