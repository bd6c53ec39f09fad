"""What the process has imported that `multiprocessing` forks processes from: importing it takes seconds.

Import this before the first process is asked of that server.
"""

from __future__ import annotations

import gc
import multiprocessing

multiprocessing.set_forkserver_preload(
    [
        "torch.distributed",
        "transformers.generation",
        "forked_servers",
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer.detokenizer_manager",
        "sglang.srt.managers.scheduler.scheduler_process",
        "sglang.srt.managers.scheduler.scheduler",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.model_loader.loader",
    ]
)


def settle() -> None:
    """To be called first in a forked process. No search for reference cycles looks at what was imported, and they are
    rarer, as in the tests' own processes (`conftest.py`). A server chooses for itself when it is up."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
