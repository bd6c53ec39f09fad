"""Has kernels and tiles measured before a server's processes start, if a flag gives it the time (`sglang.measuring`).

A process of its own does it, and is gone, with its part of the GPU's memory, before the ranks look what is free. It
never keeps a server from starting.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "sglang.measuring")
GRACE_S = 60.0
"""Seconds beyond --measure-seconds after which the process is ended: it imports and reads the model's config first, and
waits for one candidate at most."""


def measure_first(args: ServerArgs, command: Sequence[str] = COMMAND, grace_s: float = GRACE_S) -> None:
    """Measures for at most --measure-seconds, if a flag asks for it. `command`, `grace_s`: replaced by tests."""
    if args.measure_seconds <= 0 or args.no_measured_choices:
        return
    if args.nnodes > 1 or args.use_ray:
        logger.warning("--measure-seconds measures for one machine only: run `sglang tune` on the first one before")
        return
    limit = args.measure_seconds + grace_s
    options = json.dumps(asdict(args), default=str)  # a program may have given paths
    try:
        # A session of its own: an interrupt comes here first, and ends all of it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    except OSError as error:
        logger.warning("Measuring could not begin: %s; the server starts without it", error)
        return
    try:
        process.communicate(options, timeout=limit)
        if process.returncode:
            logger.warning("Measuring ended with status %d; the server starts without it", process.returncode)
    except subprocess.TimeoutExpired:
        logger.warning("Measuring did not end within %.0f s; the server starts without it", limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
