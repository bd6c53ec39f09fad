"""Places of the parts of a JSON schema, as messages show them.

A place refers to the one around it and is written out for a message only. Paths written out for every part would take
as much memory as a client's longest name times the number of parts below it.
"""

from __future__ import annotations

MAX_NAME = 64
"""Characters of a name that a message shows."""


class Place:
    """A place in a schema. `outer / name` is the one called `name` inside of it."""

    __slots__ = ("_name", "_outer")

    def __init__(self, name: str | int, outer: Place | None = None) -> None:
        self._name, self._outer = name, outer

    def __truediv__(self, name: str | int) -> Place:
        return Place(name, self)

    def __str__(self) -> str:
        names: list[str] = []
        place: Place | None = self
        while place is not None:
            names.append(str(place._name)[:MAX_NAME])
            place = place._outer
        return "/".join(reversed(names))


ROOT = Place("#")
