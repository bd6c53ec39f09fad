"""Typed one-way channels between the processes: zmq PUSH/PULL over ipc sockets, MessagePack by msgspec, never pickle.

Every channel has one reader, which binds, and any number of writers, which connect. The sockets are in a directory that
only the user may enter. A full channel exerts back-pressure instead of taking memory: `send` waits, `try_send` refuses.

If a replica runs on another machine than the front (`Ports.with_tcp_addresses`), its two channels from and to the front
are TCP sockets that the replica binds, encrypted by CURVE. A peer needs the replica's public key to talk to it, and
only the front gets that key.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from sglang.srt.errors import UserError
from sglang.srt.managers.wire import left_behind
from sglang.srt.managers.wire.io_struct import DetokenizerOutput, SchedulerInput, SchedulerOutput
from sglang.srt.managers.wire.token_ids import as_bytes, decoder, encoder

T = TypeVar("T")

HIGH_WATER_MARK = 16_384
"""Messages that may wait in a channel; with more, the reader is stuck rather than slow."""
SEND_TIMEOUT_S = 60.0
LINGER_MS = 1_000
_MEMORY_FILES = "/dev/shm"
MIN_MEMORY_FILES = 1 << 30
DRAIN_BATCH, DRAIN_BYTES = 256, 1 << 18
"""Messages, and bytes of these, behind which the event loop may run other callbacks. Among these are the streams, which
write as JSON what has come."""


class ChannelFull(RuntimeError):
    """Raised when the reader of a channel does not keep up, or is gone."""


class IntegerTooWide(ValueError):
    """Raised for an integer beyond MessagePack's 64 bits; the text is the name of its field."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A replica's keys for channels between machines, in zmq's printable form."""

    public: str
    secret: str | None = None
    """Known to the replica only."""

    def open(self, channel: zmq.Socket[bytes], address: str) -> None:
        """Binds the replica's end of a channel, or connects the front's."""
        if self.secret is None:
            channel.curve_serverkey = self.public.encode()
            channel.curve_publickey, channel.curve_secretkey = zmq.curve_keypair()
            channel.connect(address)
        else:
            channel.curve_server = 1
            channel.curve_publickey, channel.curve_secretkey = self.public.encode(), self.secret.encode()
            channel.bind(address)


@dataclass(frozen=True, slots=True)
class Ports:
    """Addresses of one replica's channels, as plain strings that can be passed to spawned processes."""

    root: str
    """Directory that contains those of all replicas; `remove` deletes it."""
    directory: str
    """Sockets and files of this replica."""
    shared_arrays: str
    """Directory of `utils.shared_array`, in memory if the system has such files; all replicas read it."""
    scheduler_input: str
    detokenizer_input: str
    tokenizer_input: str
    keys: Keys | None = None
    """Keys of the channels from and to a front on another machine; None: all sockets are of this machine."""
    replica: int = 0
    num_replicas: int = 1
    """The number of this replica, and of those that share `root`."""

    @classmethod
    def create(cls) -> Ports:
        """Makes fresh private directories (mode 0700) for sockets and shared arrays; the second's name begins with the
        first's. `remove` deletes them."""
        return cls.create_many(1)[0]

    @classmethod
    def create_many(cls, count: int) -> list[Ports]:
        """Makes directories for `count` replicas, each below a common one if there are several."""
        left_behind.remove_left(_memory_files())
        root = tempfile.mkdtemp(prefix="sglang-")
        left_behind.hold(root)
        arrays = tempfile.mkdtemp(prefix=f"{os.path.basename(root)}-arrays-", dir=_memory_files())
        directories = [root] if count == 1 else [os.path.join(root, str(index)) for index in range(count)]
        for directory in directories:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        return [
            cls(
                root=root,
                directory=each,
                shared_arrays=arrays,
                scheduler_input=_address(each, "scheduler"),
                detokenizer_input=_address(each, "detokenizer"),
                tokenizer_input=_address(each, "tokenizer"),
                replica=index,
                num_replicas=count,
            )
            for index, each in enumerate(directories)
        ]

    def with_tcp_addresses(self, host: str, ports: Sequence[int]) -> tuple[Ports, Keys]:
        """Returns the front's ports of a replica at `host`, given two unused ports there, and the keys for the
        replica."""
        public, secret = (key.decode() for key in zmq.curve_keypair())
        scheduler, tokenizer = (f"tcp://{host}:{port}" for port in ports)
        front = replace(self, scheduler_input=scheduler, tokenizer_input=tokenizer, keys=Keys(public))
        return front, Keys(public, secret)

    def on_other_machine(self, keys: Keys) -> Ports:
        """Returns the replica's ports that correspond to these ports of the front, with fresh directories of its
        machine."""
        ports = Ports.create()
        return replace(ports, scheduler_input=self.scheduler_input, tokenizer_input=self.tokenizer_input, keys=keys)

    def remove(self) -> None:
        """Deletes the directories."""
        left_behind.let_go(self.root)
        for directory in (self.root, self.shared_arrays):
            shutil.rmtree(directory, ignore_errors=True)


def _address(directory: str, name: str) -> str:
    """Returns a socket's address. Raises UserError if the path is too long."""
    path = os.path.join(directory, name)
    if len(path) > zmq.IPC_PATH_MAX_LEN:
        raise UserError(f"The socket path {path} is too long for the system; set TMPDIR to a shorter one.")
    return f"ipc://{path}"


def free_ports(host: str, count: int) -> list[int]:
    """Returns unused ports of an address. Raises UserError."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.create_server((host, 0)))
        return [each.getsockname()[1] for each in sockets]
    except OSError as error:
        raise UserError(f"cannot listen at {host}: {error.strerror or error}") from error
    finally:
        for each in sockets:
            each.close()


def _memory_files() -> str | None:
    """Returns the directory of files in memory; None if there is none, or only a small one, as in containers by
    default."""
    if not os.access(_MEMORY_FILES, os.W_OK | os.X_OK):
        return None
    system = os.statvfs(_MEMORY_FILES)
    return _MEMORY_FILES if system.f_blocks * system.f_frsize >= MIN_MEMORY_FILES else None


class Sender(Generic[T]):
    """Writing end of a channel. Use it in one thread only."""

    def __init__(self, address: str, timeout_s: float = SEND_TIMEOUT_S, keys: Keys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        if keys is None:
            self._socket.connect(address)
        else:
            keys.open(self._socket, address)
        self._encoder = encoder()
        self._address = address

    def send(self, message: T) -> None:
        """Sends a message, waiting while the channel is full. Raises ChannelFull after the time-out, and
        IntegerTooWide."""
        try:
            self._socket.send(self._encode(message))
        except zmq.Again:
            raise ChannelFull(f"nobody read {self._address} for too long") from None

    def try_send(self, message: T) -> None:
        """Sends without waiting. Raises ChannelFull and IntegerTooWide."""
        try:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelFull(f"{self._address} is full") from None

    def _encode(self, message: T) -> bytes:
        try:
            return self._encoder.encode(message)
        except OverflowError:
            raise IntegerTooWide(_field_of_widest_integer(message)) from None

    def close(self) -> None:
        self._socket.close()


def _field_of_widest_integer(message: Any) -> str:
    """Returns the path of the field with the widest integer, such as `thinking.tokens`."""
    widest: tuple[int, str] = (0, "")
    parts = [("", msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=as_bytes))]
    for path, value in parts:  # the list grows during the loop
        if isinstance(value, int):
            widest = max(widest, (abs(value), path))
        elif isinstance(value, dict):
            parts += [(f"{path}.{name}" if path else str(name), part) for name, part in value.items()]
        elif isinstance(value, list | tuple):
            parts += [(path, part) for part in value]
    return widest[1]


class Receiver(Generic[T]):
    """Reading end of a channel. `message_type` is the union of its messages; any other raises msgspec.ValidationError.
    Use it in one thread only."""

    def __init__(self, address: str, message_type: Any, keys: Keys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is None:
            self._socket.bind(address)
        else:
            keys.open(self._socket, address)
        self._decoder = decoder(message_type)
        self.num_bytes = 0
        """Bytes of all messages so far."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[T], None] | None = None

    def recv(self) -> T:
        """Waits for a message and returns it."""
        return self._decoded(self._socket.recv())

    def recv_nowait(self) -> T | None:
        """Returns the next message, or None if there is none."""
        try:
            return self._decoded(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _decoded(self, content: bytes) -> T:
        self.num_bytes += len(content)
        message: T = self._decoder.decode(content)
        return message

    def drain(self) -> Iterator[T]:
        """Yields the messages that have arrived."""
        while (message := self.recv_nowait()) is not None:
            yield message

    def poll(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for a message. Returns whether there is one."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def attach(self, handler: Callable[[T], None]) -> None:
        """Calls `handler` with each message from the running event loop. An exception of the handler reaches the loop's
        exception handler; later messages are still delivered."""
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._deliver)
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Reads until the socket is empty, or schedules itself again: the descriptor of a zmq socket signals edges
        only."""
        if self._loop is None or self._handler is None:
            return
        pending, end = True, self.num_bytes + DRAIN_BYTES
        try:
            for _ in range(DRAIN_BATCH):
                if self.num_bytes >= end:
                    return
                message = self.recv_nowait()
                if message is None:
                    pending = False
                    return
                self._handler(message)
        finally:
            if pending and self._loop is not None:
                self._loop.call_soon(self._deliver)

    def detach(self) -> None:
        """Removes the handler from the event loop."""
        if self._loop is not None:
            self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
            self._loop = self._handler = None

    def close(self) -> None:
        self.detach()
        self._socket.close()


# --- the channels of a replica ----------------------------------------------------------------------------------------


def scheduler_inbox(ports: Ports) -> Receiver[SchedulerInput]:
    """Opens the leader's end of the channel from the front. Other ranks get its messages from the leader."""
    return Receiver(ports.scheduler_input, SchedulerInput, ports.keys)


def scheduler_outbox(ports: Ports) -> Sender[SchedulerOutput]:
    """Opens the leader's end of the channel to the detokenizer."""
    return Sender(ports.detokenizer_input)


def detokenizer_inbox(ports: Ports) -> Receiver[SchedulerOutput]:
    """Opens the detokenizer's end of the channel from the scheduler."""
    return Receiver(ports.detokenizer_input, SchedulerOutput)


def detokenizer_outbox(ports: Ports) -> Sender[DetokenizerOutput]:
    """Opens the detokenizer's end of the channel to the front."""
    return Sender(ports.tokenizer_input, keys=ports.keys)


def tokenizer_inbox(ports: Ports) -> Receiver[DetokenizerOutput]:
    """Opens the front's end of the channel from a replica's detokenizer."""
    return Receiver(ports.tokenizer_input, DetokenizerOutput, ports.keys)


def tokenizer_outbox(ports: Ports) -> Sender[SchedulerInput]:
    """Opens the front's end of the channel to a replica's scheduler."""
    return Sender(ports.scheduler_input, keys=ports.keys)
