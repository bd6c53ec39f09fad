"""Checks that ray is installed: it is an extra, and nothing else imports it."""

from __future__ import annotations

from importlib.util import find_spec

from sglang.srt.errors import UserError


def check_installed() -> None:
    """Raises UserError without ray."""
    if find_spec("ray") is None:
        raise UserError("--use-ray needs ray on every node: pip install 'sm120-sglang[ray]'.")
