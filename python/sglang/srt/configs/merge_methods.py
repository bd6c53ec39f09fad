"""Names of the methods by which DCP ranks merge their partial attention."""

from __future__ import annotations

ALL_TO_ALL, GATHER_SCATTER = "a2a", "ag_rs"
MERGE_METHODS = (ALL_TO_ALL, GATHER_SCATTER)
