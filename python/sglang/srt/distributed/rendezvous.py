"""Where ranks of several machines meet before they have groups: the store at --dist-init-addr."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from sglang.srt.errors import UserError


def open_store(address: str, here: bool, limit: timedelta) -> dist.TCPStore:
    """Returns the store at HOST:PORT in which ranks of several machines meet. here: this rank serves it."""
    host, _, port = address.rpartition(":")
    if not here:
        try:
            return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=limit, wait_for_workers=False)
        except dist.DistError as error:
            raise UserError(
                f"--dist-init-addr {address}: no server answers there within {limit.total_seconds():g} s"
                f" ({str(error).splitlines()[0]}). Is machine 0 started, is this an address of it, and the port open?"
            ) from error
    listener = _listener(host.strip("[]"), int(port))
    return dist.TCPStore(
        host.strip("[]"), int(port), is_master=True, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def wait_for_ranks(store: dist.Store, address: str, rank: int, count: int, limit_s: float, backend: str) -> None:
    """Waits until all ranks have come to the store. Raises UserError that names those missing, or those on another
    backend."""
    keys = [f"here/{other}" for other in range(count)]
    store.set(keys[rank], backend)
    try:
        store.wait(keys, timedelta(seconds=limit_s))
        backends = [store.get(key).decode() for key in keys]
    except dist.DistError as error:
        try:
            absent = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        except dist.DistError:  # machine 0 has given up before this one
            absent = ["others"]
        raise UserError(
            f"--dist-init-addr {address}: of {count} ranks, {', '.join(absent)} did not come within {limit_s:g} s."
            " Start the same command on every machine, each with its own --node-rank; --dist-timeout says how long they"
            " wait."
        ) from error
    if len(set(backends)) > 1:
        on_gpu, on_cpu = backends.index("nccl"), backends.index("gloo")
        raise UserError(
            f"rank {on_gpu} computes on a GPU and rank {on_cpu} on a CPU. Where nvidia-smi shows GPUs, torch must see"
            " them (torch.cuda.is_available()); or give --device cpu on all machines."
        )


def _listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on this address only. Raises UserError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(1024)
    except OSError as error:
        raise UserError(
            f"--dist-init-addr {host}:{port}: {error.strerror}. It must be an address of machine 0, with a port that"
            " nothing uses."
        ) from error
    return opened
