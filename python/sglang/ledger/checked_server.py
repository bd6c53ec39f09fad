"""`python -m sglang.ledger serve [flags of the server]`: a server whose kernel launches are compared with the ledger.

Each scheduler process starts here instead of in `sglang.srt`, which does not know these tools.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang.launch_server import serve
from sglang.ledger.coverage import check_launches
from sglang.srt.hardware.arch import current_arch
from sglang.srt.managers import launch
from sglang.srt.managers.child import ChildPipe
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.plan.layout import asked_node
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)
ENTRY = f"{__name__}:run_checked_scheduler"


def run_checked_scheduler(args: ServerArgs, ports: Ports, rank: int, start_pipe: ChildPipe) -> None:
    """Runs a scheduler process that checks its launches."""
    arch = current_arch(asked_node(args).device(rank), args.device)
    if arch.capability is None:
        logger.warning("No launch is compared with the ledger: this machine has no GPU")
    else:
        check_launches(arch)
    from sglang.srt.managers.scheduler.scheduler_process import run_scheduler

    run_scheduler(args, ports, rank, start_pipe)


def serve_checked(argv: Sequence[str]) -> None:
    """Serves until told to stop. Raises UserError."""
    launch.SCHEDULER_ENTRY = ENTRY
    serve(argv, "python -m sglang.ledger serve")
