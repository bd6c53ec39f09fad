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
CLOCK = """
import contextlib, time
from types import SimpleNamespace
from sglang.srt.managers import watchdog
from sglang.srt.managers.watchdog import Watchdog
now, step_s = 0.0, 0.02
watchdog.time = SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: time.sleep(step_s / 2))
"""
"""Of the watchdog, which the test moves: how long a busy machine takes for a step says nothing."""
FINE = f"""{CLOCK}
watchdog = Watchdog(100.0)
for _ in range(100):
    watchdog.busy()
    now += 2.0
    time.sleep(step_s)
watchdog.idle()
now += 1000.0
time.sleep(10 * step_s)
"""
FAILED = f"""{CLOCK}
with contextlib.suppress(ConnectionError), Watchdog(100.0) as watchdog:
    watchdog.busy()
    raise ConnectionError
now += 1000.0
time.sleep(10 * step_s)  # its report
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_stuck() -> None:
    done = run(STUCK)
    assert done.returncode == 3
    assert "--watchdog-timeout" in done.stderr and "stuck_here" in done.stderr


@pytest.mark.parametrize("code", [FINE, FAILED], ids=["slow-then-idle", "failed"])
def test_what_is_not_stuck(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr
