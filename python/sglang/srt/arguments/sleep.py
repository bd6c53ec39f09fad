"""Options of servers whose memory can be given back while they run."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arguments.groups import MEMORY
from sglang.srt.cli_args import option


@dataclass(kw_only=True)
class SleepArgs:
    """Options of sleep and wake."""

    enable_memory_saver: bool = option(
        False,
        MEMORY,
        "Memory of weights, caches and graphs can be given back and taken again: /release_memory_occupation, /sleep.",
        "--enable-sleep-mode",
    )
    enable_weights_cpu_backup: bool = option(
        False,
        MEMORY,
        "/release_memory_occupation keeps the weights in main memory; without it they are sent, or read again.",
    )
    wake_on_request: bool = option(False, MEMORY, "A request wakes a sleeping server, which else refuses it with 503.")
