"""`python -m sglang.plan --model-path DIR --gpus 8 --gpu rtx-pro-6000`"""

import sys

from sglang.launch_server import report_user_errors
from sglang.plan.command import run_plan

if __name__ == "__main__":
    sys.exit(report_user_errors(lambda: run_plan(sys.argv[1:])))
