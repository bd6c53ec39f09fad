"""Mixtures of experts: the router, the routed experts and the shared one."""
