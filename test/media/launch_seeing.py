"""`python launch_seeing.py FLAGS`: a server of a model that sees, whose scheduler echoes prompts.

Names under `.example` are at PUBLIC_HERE, an address of this machine that counts as a public one, so that tests have a
web server that may be asked. The name TURNING is at 127.0.0.1 whenever it is looked up a second time.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scheduler's process, too

from sglang.launch_server import report_user_errors, serve
from sglang.srt.managers import launch
from sglang.srt.managers.front.media import sources

PUBLIC_HERE, TURNING = "127.0.0.2", "turning.example"


def resolver() -> None:
    resolve, is_public, turns = sources.resolve, sources.is_public, itertools.cycle((PUBLIC_HERE, "127.0.0.1"))

    def resolved(host: str, port: int) -> list[str]:
        if host == TURNING:
            return [next(turns)]
        return [PUBLIC_HERE] if host.endswith(".example") else resolve(host, port)

    sources.resolve = resolved
    sources.is_public = lambda address: address == PUBLIC_HERE or is_public(address)


if __name__ == "__main__":
    resolver()
    launch.SCHEDULER_ENTRY = "srt.managers.fake_scheduler:run_scheduler"
    tower = SimpleNamespace(pixel_dtype=lambda dtype: "float32")
    seeing = SimpleNamespace(media=SimpleNamespace(tower=tower), transformers_class=None)
    launch.describe_served_model = lambda args, model: seeing  # type: ignore[assignment,return-value]
    sys.exit(report_user_errors(lambda: serve(None, "launch_seeing")))
