"""The network addresses that a client may have the server connect to.

A name is resolved once, and the connection goes to an address that was checked: a second answer of the name server
cannot lead elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are the IPv4 address that a gateway connects to (RFC 6052)."""
_TRANSLATED_LOCALLY = ipaddress.IPv6Network("64:ff9b:1::/48")


def is_public(address: str) -> bool:
    """Returns whether it is an address of the internet, also where an IPv6 address stands for an IPv4 one.

    >>> [is_public(text) for text in ("8.8.8.8", "10.0.0.1", "::ffff:127.0.0.1", "169.254.169.254")]
    [True, False, False, False]
    """
    return all(_is_public(meant) for meant in _meant(ipaddress.ip_address(address.partition("%")[0])))


def _is_public(address: Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _meant(address: Address) -> Iterator[Address]:
    """The address, and those of IPv4 that it carries."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    if address in _TRANSLATED:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return
    yield ipaddress.IPv4Address("0.0.0.0") if address in _TRANSLATED_LOCALLY else address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield address.teredo[1]


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order in which to try them. Raises OSError, UnicodeError."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
