"""`python -m sglang.doctor [--json] [--no-copies]`"""

import sys

from sglang.doctor.command import run_doctor

if __name__ == "__main__":
    sys.exit(run_doctor(sys.argv[1:]))
