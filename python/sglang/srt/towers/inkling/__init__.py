"""The encoder of Inkling."""
