"""A stuck process ends with a non-zero status and says where it was stuck; a slow or idle one goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUCK = """
import time
from sglang.srt.managers.watchdog import Watchdog
watchdog = Watchdog(0.2)
watchdog.busy()
def stuck_here():
    time.sleep(60)
stuck_here()
"""
FINE = """
import time
from sglang.srt.managers.watchdog import Watchdog
watchdog = Watchdog(0.4)
for _ in range(10):
    watchdog.busy()
    time.sleep(0.1)
watchdog.idle()
time.sleep(1.0)
"""
FAILED = """
import contextlib, time
from sglang.srt.managers.watchdog import Watchdog
with contextlib.suppress(ConnectionError), Watchdog(0.2) as watchdog:
    watchdog.busy()
    raise ConnectionError
time.sleep(1.0)  # its report
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)


def test_stuck() -> None:
    done = run(STUCK)
    assert done.returncode == 3
    assert "--watchdog-timeout" in done.stderr and "stuck_here" in done.stderr


@pytest.mark.parametrize("code", [FINE, FAILED], ids=["slow-then-idle", "failed"])
def test_what_is_not_stuck(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr
