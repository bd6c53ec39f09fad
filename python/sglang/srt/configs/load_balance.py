"""The methods to choose the replica of a request (--load-balance-method); `managers.front.replica_router` implements
them."""

from __future__ import annotations

AUTO = "auto"
"""By the replicas' cached prefixes, within bounds of their load."""
ROUND_ROBIN = "round_robin"
TOTAL_REQUESTS = "total_requests"
TOTAL_TOKENS = "total_tokens"

BALANCE_METHODS = (AUTO, ROUND_ROBIN, TOTAL_REQUESTS, TOTAL_TOKENS)
