"""`compressed` with keys of the indexer made of the entries, and an indexer of two levels (DeepSeek-V4.1)."""
