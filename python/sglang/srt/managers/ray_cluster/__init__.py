"""Ranks on the nodes of a Ray cluster (--use-ray): Ray says where, and starts one actor a machine of a replica, which
starts the ranks there as a server does. No message between ranks, or with the front, goes through Ray."""
