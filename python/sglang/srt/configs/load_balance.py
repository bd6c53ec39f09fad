"""Ways to choose the replica of a request (--load-balance-method). `managers.front.replica_router` computes them."""

from __future__ import annotations

AUTO = "auto"
"""By the prefix that a replica has, within bounds of its load."""
ROUND_ROBIN = "round_robin"
TOTAL_REQUESTS = "total_requests"
TOTAL_TOKENS = "total_tokens"

BALANCE_METHODS = (AUTO, ROUND_ROBIN, TOTAL_REQUESTS, TOTAL_TOKENS)
