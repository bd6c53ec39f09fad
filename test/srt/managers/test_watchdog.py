"""A stuck process ends with a non-zero status and says where it was stuck; a slow or idle one goes on."""

from __future__ import annotations

import subprocess
import sys

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


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)


def test_stuck() -> None:
    done = run(STUCK)
    assert done.returncode == 3
    assert "--watchdog-timeout" in done.stderr and "stuck_here" in done.stderr


def test_slow_but_alive_and_idle() -> None:
    assert run(FINE).returncode == 0
