"""A server whose answers are written down: its front, parsers and templates are real, and no model is asked."""
