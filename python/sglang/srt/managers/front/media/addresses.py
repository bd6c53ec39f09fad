"""Checks the network addresses that a client may make the server connect to.

A name is resolved once, and the connection goes to an address that was checked, so a second answer of the name server
cannot lead elsewhere. The ranges are those of IANA's special-purpose address registries, also where this Python version
does not know them, and addresses that clouds use for their own services though they look public.
"""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *("224.0.0.0/4", "240.0.0.0/4"),
            "168.63.129.16/32",  # Azure's platform services
            *("161.26.0.0/16", "166.8.0.0/14"),  # IBM Cloud's services
        ),
    )
)
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""The range that contains all public IPv6 addresses."""
_NOT_PUBLIC_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
            "3ffe::/16",  # the former 6bone
        ),
    )
)
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are the IPv4 address that a gateway connects to (RFC 6052)."""


def is_public(address: str) -> bool:
    """Returns whether an address is public on the internet, also where an IPv6 address stands for an IPv4 one.

    >>> [is_public(text) for text in ("8.8.8.8", "10.0.0.1", "::ffff:127.0.0.1", "169.254.169.254")]
    [True, False, False, False]
    """
    return _is_public(_embedded_ipv4(ipaddress.ip_address(address.partition("%")[0])))


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)


def _embedded_ipv4(address: Address) -> Address:
    """Returns the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a name in the order in which to try them. Raises OSError, UnicodeError."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
