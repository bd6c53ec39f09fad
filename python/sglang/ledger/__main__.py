"""`python -m sglang.ledger check|update|report|serve`"""

import sys

from sglang.launch_server import report_user_errors
from sglang.ledger.command import main

if __name__ == "__main__":
    sys.exit(report_user_errors(main))
