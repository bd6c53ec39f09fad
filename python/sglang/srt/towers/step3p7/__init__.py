"""The encoder of Step-3.7."""
