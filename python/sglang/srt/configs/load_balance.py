"""The methods to choose the replica of a request (--load-balance-method); `managers.front.replica_router` implements
them."""

from __future__ import annotations

AUTO = "auto"
"""By the replicas' cached prefixes, within bounds of their load."""
PREFIX_AFFINITY = "prefix_affinity"
"""A session stays at its replica, within bounds of the load."""
ROUND_ROBIN = "round_robin"
TOTAL_REQUESTS = "total_requests"
TOTAL_TOKENS = "total_tokens"

LOAD_METHODS = (ROUND_ROBIN, TOTAL_REQUESTS, TOTAL_TOKENS)
"""The methods that look at no prefix."""
BALANCE_METHODS = (AUTO, PREFIX_AFFINITY, *LOAD_METHODS)
"""The choice of a replica: by prefix or session within bounds of the load, by turns, and by load."""
