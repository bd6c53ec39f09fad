"""Machines that meet: the interface over which libraries talk, and what may travel between processes."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch.distributed as dist

import sglang
from sglang.srt.distributed import rendezvous
from sglang.srt.distributed.nodes import interface_to, use_interface
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PICKLES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve"})
OBJECTS = frozenset(
    {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
    | {"send_object_list", "recv_object_list"}
)
"""Calls of libraries that pickle."""


def two_machines(address: str) -> ServerArgs:
    return ServerArgs.from_kwargs(model_path="m", device="cpu", tp_size=2, nnodes=2, dist_init_addr=address)


def test_libraries_talk_over_the_interface_to_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "named0")
    use_interface(two_machines("127.0.0.1:50000"))
    assert [os.environ[variable] for variable in VARIABLES] == ["lo", "named0"]


def test_an_address_of_no_network_is_said() -> None:
    with pytest.raises(UserError, match="--dist-init-addr no.such.host.invalid: "):
        interface_to("no.such.host.invalid")


def test_machines_that_compute_on_other_devices_do_not_wait_for_one_another() -> None:
    store = dist.HashStore()
    store.set("here/1", "nccl")
    with pytest.raises(UserError, match="rank 1 computes on a GPU and rank 0 on a CPU"):
        rendezvous.wait_for_ranks(store, "127.0.0.1:50000", 0, 2, 5.0, "gloo")


def test_nothing_that_arrives_is_unpickled() -> None:
    """No module of the server imports what reads pickled objects, or calls what does so inside of libraries."""
    for file in (Path(sglang.__file__).parent / "srt").rglob("*.py"):
        text = file.read_text()
        nodes = ast.walk(ast.parse(text)) if any(word in text for word in (*PICKLES, *OBJECTS)) else ()
        for node in nodes:
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Attribute):
                names = {node.attr}
            assert not names & (PICKLES | OBJECTS), f"{file}:{getattr(node, 'lineno', 0)}"
