"""Encoding of prompts' token ids in messages: int32 arrays, four bytes a token in memory and in transit.

A list of Python integers takes ten times as much. Samples of one prompt share their array.
"""

from __future__ import annotations

from typing import Any, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
_WIRE = np.dtype("<i4")


def encoder() -> msgspec.msgpack.Encoder:
    """Returns an encoder for messages with arrays."""
    return msgspec.msgpack.Encoder(enc_hook=as_bytes)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Returns a decoder of messages of this type; the arrays in them are read-only."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes)


def as_bytes(value: Any) -> bytes:
    """Returns an array's bytes. Raises NotImplementedError for other values."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"messages have no {type(value).__name__}")
    return value.astype(_WIRE, copy=False).tobytes()


def _from_bytes(kind: Any, value: Any) -> Ids:
    assert get_origin(kind) is np.ndarray, kind
    return np.frombuffer(value, _WIRE)
