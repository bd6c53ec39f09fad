"""What `scripts/mutations.py` is made of: changes, the tests that run a line, and trials."""
