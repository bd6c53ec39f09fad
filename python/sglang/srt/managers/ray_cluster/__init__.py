"""Ranks on the nodes of a Ray cluster (--use-ray). Ray chooses the nodes and starts one actor for each machine of a
replica, which starts the ranks there like a server does. No message between ranks, or with the front, goes through
Ray."""
