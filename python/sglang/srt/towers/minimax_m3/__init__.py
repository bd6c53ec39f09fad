"""The encoder of MiniMax-M3."""
