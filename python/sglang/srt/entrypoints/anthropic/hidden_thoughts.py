"""Thoughts of answers that do not show them (`thinking.display` omitted).

The block's signature carries them, so that the client sends them back with the conversation and the model goes on from
them. It is no secret: a client that wants to read them can.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "local-thoughts."
"""The beginning of signatures that this server wrote."""


def signature_of(thoughts: str) -> str:
    return _MARK + base64.b64encode(thoughts.encode()).decode()


def shown_thoughts(thinking: str, signature: str | None) -> str:
    """Returns the thoughts of a block as the model reads them."""
    if thinking or signature is None or not signature.startswith(_MARK):
        return thinking
    try:
        return base64.b64decode(signature[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return thinking
