"""The meeting of the ranks of several machines (--nnodes), and the settings on which they must agree.

The ranks meet in a torch.distributed store at --dist-init-addr, on machine 0. Then all exchange and compare how they
were started. Messages are tensors, JSON and MessagePack, never pickle. With a secret (SGLANG_DIST_SECRET) everything
that the leader broadcasts is signed; without one the network must be private.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

import sglang.srt
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.agreement import refuse_unlike_ranks
from sglang.srt.distributed.checkpoint_contents import checkpoint_contents
from sglang.srt.errors import UserError
from sglang.srt.plan.plan_items import Items, flat
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.host_port import split_address
from sglang.version import __version__

_SIOCGIFADDR = 0x8915
_EACH_ITS_OWN = frozenset(
    {"node_rank", "host", "port", "api_key", "admin_api_key", "model_path", "tokenizer_path", "download_dir"}
    | {
        "served_model_name",
        "log_level",
        "log_requests",
        "log_requests_level",
        "random_seed",
        "dist_init_addr",
        "chat_template",
    }
    | {"speculative_draft_model_path", "dry_run", "dist_timeout"}
)
"""Arguments that may differ between machines: paths, those that only the API server reads, and the seed, which the
leader sends."""


def rendezvous(args: ServerArgs, directory: str) -> str:
    """Returns the address at which the ranks meet, as `parallel_state.init` takes it: a file of this machine, or the
    TCP address of machine 0."""
    if args.nnodes == 1:
        return f"file://{directory}/rendezvous"
    host, port = split_address(args.dist_init_addr or "")
    return f"tcp://{host}:{port}"


def use_interface(args: ServerArgs) -> None:
    """Makes gloo and NCCL use the network interface that leads to machine 0, unless the environment names one. Raises
    UserError if there is none."""
    host, _ = split_address(args.dist_init_addr or "")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if variable not in os.environ:
            os.environ[variable] = interface_to(host)


def interface_to(host: str) -> str:
    """Returns the network interface over which this machine reaches `host`. Raises UserError if there is none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            address_here = probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"--dist-init-addr {host}: {error.strerror or error}") from error
    for _, name in socket.if_nameindex():
        if _address(name) == address_here:
            return name
    raise UserError(f"--dist-init-addr {host}: no network interface of this machine has the address {address_here}")


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def common(args: ServerArgs, config: Mapping[str, Any]) -> Items:
    """Returns the settings that must be equal on all machines. config: the model's config.json."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    flags = {name: value for name, value in asdict(args).items() if name not in _EACH_ITS_OWN}
    return {"version": __version__, "program": _program(), "config.json": digest} | dict(flat(flags))


def _program() -> str:
    """Returns a digest of the server's own files, because two checkouts of one version may decide differently."""
    root, digest = Path(sglang.srt.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".json"):
            digest.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def agree(args: ServerArgs, model: ModelConfig) -> None:
    """Takes over the leader's random seed, and compares how the machines were started and their copies of the model.
    Collective. Raises UserError on every rank if two differ."""
    leader = parallel_state.is_leader()
    said = parallel_state.broadcast_bytes(msgspec.json.encode(args.random_seed) if leader else None)
    args.random_seed = msgspec.json.decode(said, type=int | None)
    machine = f"machine {args.node_rank}"
    refuse_unlike_ranks(machine, common(args, model.hf_config), "are not started alike")
    files = checkpoint_contents(Path(model.model_path), args.load_format != "dummy")
    refuse_unlike_ranks(machine, files, "have different copies of the model")
