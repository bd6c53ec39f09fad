"""Errors whose message is meant for the person who started the program."""

from __future__ import annotations

from sglang.version import __version__


class UserError(ValueError):
    """Something that the user asked for cannot be done. The message says what, and what to do instead; entry points
    print it without a traceback and exit with status 2."""


class Problems:
    """The problems of a command, collected so that the user reads all of them at once."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        """Put before each text, for example the name of a file."""
        self.fields: set[str] = set()
        """Options whose values are unusable; nothing that depends on them can be judged."""
        self._texts: list[str] = []
        self._refused: dict[str, list[str]] = {}

    def add(self, text: str, *fields: str) -> None:
        """Adds a problem with the names of the fields that cause it."""
        self._texts.append(self.where + text)
        self.fields.update(fields)

    def refuse(self, what: str, reason: str) -> None:
        """`what` does not exist here. Those with one reason are reported together."""
        names = self._refused.setdefault(reason, [])
        if what not in names:
            names.append(what)

    def extend(self, other: Problems) -> None:
        """Adds all problems of another list."""
        self._texts += other.texts()
        self.fields |= other.fields

    def texts(self) -> list[str]:
        """Returns the texts in the order in which they were added."""
        refusals = (
            f"{self.where}{', '.join(names)} {'is' if len(names) == 1 else 'are'} not implemented in sm120-sglang"
            f" {__version__}: {reason}."
            for reason, names in self._refused.items()
        )
        return [*self._texts, *refusals]

    def raise_if_any(self) -> None:
        """Raises UserError: the one problem, or a list of all."""
        texts = self.texts()
        if len(texts) > 1:
            texts = [f"{len(texts)} problems:", *(f"- {text}" for text in texts)]
        if texts:
            raise UserError("\n".join(texts))
