"""Log format of all processes of the server."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, process: str = "") -> None:
    """Logs to standard error as `[2026-01-31 12:00:00 PROCESS] message`; `level` as in `--log-level`.

    Call it once in each process, at its start.
    """
    name = f" {process}" if process else ""
    formatter = logging.Formatter(f"[%(asctime)s{name}] %(message)s", "%Y-%m-%d %H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
