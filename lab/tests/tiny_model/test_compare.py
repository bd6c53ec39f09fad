"""The comparison with transformers: where two continuations part, and where an answer ends."""

from __future__ import annotations

import pytest
from tiny_model.compare import first_difference, until
from tiny_model.layout import TOKENIZER_FILE
from tokenizers import Tokenizer


@pytest.mark.parametrize(
    ("reference", "server", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([1, 2], [1, 2, 3], 2)],
)
def test_first_difference(reference: list[int], server: list[int], place: int | None) -> None:
    assert first_difference(reference, server) == place


def test_text_is_compared_to_the_stop_string() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    one, other, rest = (tokenizer.encode(text).ids for text in (" 4\n\nQuestion: Why", " 4\n\nQuestion: Who", " 4 ap"))
    kept = until(tokenizer, one, "Question")
    assert tokenizer.decode(kept) == " 4\n\nQuestion" and kept == until(tokenizer, other, "Question")
    assert until(tokenizer, rest, "Question") == rest
