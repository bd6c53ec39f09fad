"""Parsing of HOST:PORT addresses."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(address)
    return host.strip("[]"), int(port)
