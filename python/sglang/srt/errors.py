"""Errors whose message is meant for the person who started the program."""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user asked for cannot be done. The message says what, and what to do instead; entry points
    print it without a traceback and exit with status 2."""
