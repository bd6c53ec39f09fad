"""Runs `python -m sglang.doctor [--json] [--no-copies]`."""

import sys

from sglang.doctor.command import run_doctor
from sglang.launch_server import report_user_errors

if __name__ == "__main__":
    sys.exit(report_user_errors(lambda: run_doctor(sys.argv[1:])))
