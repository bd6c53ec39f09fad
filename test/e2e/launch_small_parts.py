"""`python launch_small_parts.py FLAGS`: a server whose front sends pictures to other machines in parts of 10,000 bytes,
of which a picture of the embedded model has a dozen."""

from __future__ import annotations

import sys

from sglang.launch_server import report_user_errors, serve
from sglang.srt.managers.front.media import array_transfers

if __name__ == "__main__":
    array_transfers.PART_BYTES = 10_000
    sys.exit(report_user_errors(lambda: serve(None, "launch_small_parts")))
