"""The process that compiles: receives a `Job` and sends a `Report`, through the pipe whose number it is given. It uses
no GPU."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from sglang.srt.utils.process_limits import die_with_parent, name_process

NICENESS = 5


def main() -> None:
    """Runs the job that comes through the pipe."""
    die_with_parent()
    name_process("compile_ahead")
    os.nice(NICENESS)
    with suppress(OSError):  # where memory runs out, this ends before a rank does
        Path("/proc/self/oom_score_adj").write_text("1000")
    logging.disable()  # the rank says all that once more
    from sglang.srt.managers.compile_ahead.job import Job, run  # takes seconds

    pipe = Connection(int(sys.argv[1]))
    job: Job = pipe.recv()
    if pipe.poll():  # with its end: the rank is gone
        return
    os.sched_setaffinity(0, job.cpus)
    pipe.send_bytes(msgspec.json.encode(run(job)))


if __name__ == "__main__":
    main()
