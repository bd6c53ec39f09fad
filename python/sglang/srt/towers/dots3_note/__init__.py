"""The encoder of dots3-note."""
