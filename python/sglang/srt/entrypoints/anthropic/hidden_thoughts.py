"""Thoughts of answers that do not show them (`thinking.display` omitted).

The block's signature carries them, so that the client sends them back with the conversation and the model can continue
from them. The signature is not encrypted: a client can decode it.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "local-thoughts."
"""Prefix of the signatures that this server writes."""


def signature_of(thoughts: str) -> str:
    """Returns a signature that carries the thoughts."""
    return _MARK + base64.b64encode(thoughts.encode()).decode()


def shown_thoughts(thinking: str, signature: str | None) -> str:
    """Returns the thoughts of a block as the model reads them."""
    if thinking or signature is None or not signature.startswith(_MARK):
        return thinking
    try:
        return base64.b64decode(signature[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return thinking
