"""Names of the ways in which ranks that share out the tokens of a cache merge what each of them attended to."""

from __future__ import annotations

ALL_TO_ALL, GATHER_SCATTER = "a2a", "ag_rs"
MERGE_METHODS = (ALL_TO_ALL, GATHER_SCATTER)
