"""How much the fuzz tests send: little in CI, much with FUZZ=long (`make fuzz`)."""

from __future__ import annotations

import os

LONG = os.environ.get("FUZZ") == "long"

TIMEOUT_S = 7200 if LONG else 1200
"""Of a test. Without FUZZ=long none takes a minute; one that hangs should fail before CI gives up."""

SOAK_REQUESTS = 2000 if LONG else 16
"""In a round."""
SOAK_ROUNDS = 3 if LONG else 1

API_EXAMPLES = 300 if LONG else 1
"""Random ones for each operation, beyond the values at the edge of each field's range."""
EDGES_AT_FIRST, EDGES_STEP = (0, 1) if LONG else (4, 160)
"""Of those values the first, and then each how many-th: all, or some."""
LONGEST_EDGE = 1 << 20 if LONG else 1024
"""The most entries or characters whose limit is tried: a request with one more than 16,384 messages takes as long as a
hundred others."""

NUMBER_STEP = 1 if LONG else 16
"""A number is tried in each how many-th of the fields."""
GRAMMAR_STEP = 1 if LONG else 8
"""A server gets each how many-th of the hostile grammars and schemas."""
PATTERN_STEP = 1 if LONG else 6
"""Each how many-th of the hostile patterns is a `regex`; as many others are a `stop_regex`."""

SILENCE_LIMIT_S = 1.0 if LONG else 10.0
SILENCE_LIMIT_CPU_S = 1.0 if LONG else 3.0
