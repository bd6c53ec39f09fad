"""Lists of a schema's words that count how often one is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Values(list[str]):
    """`num_read` counts for all lists together."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        return Values(super().__getitem__(place))

    def __iter__(self) -> Iterator[str]:
        for value in super().__iter__():
            Values.num_read += 1
            yield value
