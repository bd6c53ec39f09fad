"""The selection of blocks of neighbouring tokens for each KV head (MiniMax-M3)."""
