"""Runs that may end early: each test's first case comes before the others, and then its last one."""

from __future__ import annotations

from types import SimpleNamespace

import first_cases


def test_order() -> None:
    items = [SimpleNamespace(nodeid=name) for name in ("f[1]", "f[2]", "f[3]", "f[4]", "g", "h[1]", "h[2]")]
    assert [item.nodeid for item in first_cases.by_case(items)] == ["f[1]", "g", "h[1]", "f[4]", "h[2]", "f[2]", "f[3]"]  # type: ignore[arg-type]


def test_no_test_begins_late() -> None:
    for seconds, expected in ((60.0, False), (-1.0, "the time is over")):
        item = SimpleNamespace(session=SimpleNamespace(shouldstop=False))
        first_cases.FirstCases(seconds).pytest_runtest_teardown(item)  # type: ignore[arg-type]
        assert item.session.shouldstop == expected
