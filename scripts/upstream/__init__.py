"""Carries the SM120 changes onto a pristine SGLang tree: see docs/upstream.md."""
