"""`python launch_seeing.py FLAGS`: a server of a model that sees, whose scheduler echoes prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scheduler's process, too

from sglang.launch_server import report_user_errors, serve
from sglang.srt.managers import launch

if __name__ == "__main__":
    launch.SCHEDULER_ENTRY = "srt.managers.fake_scheduler:run_scheduler"
    launch.describe_served_model = lambda args, model: SimpleNamespace(media=True)  # type: ignore[assignment,return-value]
    sys.exit(report_user_errors(lambda: serve(None, "launch_seeing")))
