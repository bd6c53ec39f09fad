"""`python hasty_launch.py [options]`: the server, whose templates have less time than those of users."""

from __future__ import annotations

import sys
from typing import Any

from sglang.launch_server import report_user_errors, serve
from sglang.srt.entrypoints import http_state
from sglang.srt.entrypoints.openai.template_pool import TemplateLimits, template_limits

SECONDS = 4


def hasty_limits(*given: Any) -> TemplateLimits:
    return template_limits(*given)._replace(seconds=float(SECONDS))


if __name__ == "__main__":
    http_state.template_limits = hasty_limits
    sys.exit(report_user_errors(lambda: serve(sys.argv[1:], "python -m sglang.launch_server")))
