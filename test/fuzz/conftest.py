from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz.guarded_server import GuardedServer
from fuzz.target import Target


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    it = Target()
    yield it
    it.end()
    print("\nservers, and silences within the limits:", *it.seen, sep="\n  ")


@pytest.fixture
def server(target: Target) -> Iterator[GuardedServer]:
    """A server of which, after the test, the ordinary is still true."""
    yield target.server()
    target.check()
