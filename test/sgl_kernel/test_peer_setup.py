"""What a server does with its GPUs' links: CPU processes, links with a defect, collectives for a CPU."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_servers import ForkedProgram, start_fork_server
from rank_processes import run_ranks

from sgl_kernel.test_custom_all_reduce import collectives, joined
from sglang.srt.distributed import peer_probe, peer_setup
from sglang.srt.hardware.topology import Topology

LINKS = "srt.distributed.fake_links:links"
TESTS = Path(__file__).resolve().parents[1]


def connect(rank: int, ranks: int, folder: str, library: str) -> None:
    start_fork_server()
    group = joined(rank, ranks, folder)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    peer_setup.logger.addHandler(handler)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])

    def connected(defect: str, load=lambda: collectives(library), program=ForkedProgram):
        os.environ["FAKE_DEFECT"] = defect
        records.clear()
        with patch.object(peer_probe.subprocess, "Popen", program):
            return peer_setup.connect(group, rank, Topology.SWITCH, 60.0, load, LINKS)

    links, reducer = connected("", program=subprocess.Popen)  # to import torch takes it two seconds
    assert links.problem == "" and links.topology is Topology.SWITCH and reducer is not None and not records
    x = torch.full((2, 512), rank + 1.0)
    assert torch.equal(reducer.all_reduce(x), torch.full((2, 512), 3.0))
    reducer.close()

    links, reducer = connected("own buffer")
    assert reducer is None and "what rank 0 writes to rank 1 lands in its own memory" in links.problem
    assert len(records) == (rank == 0) and all("through NCCL alone" in text and "IOMMU" in text for text in records)

    def absent():
        raise OSError("libsm120_sgl_kernel.so: cannot open shared object file")

    links, reducer = connected("", absent if rank == 1 else lambda: collectives(library))
    assert reducer is None and "cannot open shared object file" in links.problem
    dist.destroy_process_group()


@pytest.mark.slow
def test_links_are_probed_before_they_are_used(tmp_path: Path, cpu_collectives: Path) -> None:
    run_ranks(connect, (2, str(tmp_path), str(cpu_collectives)), 2)
