"""Draft tokens that are looked up in earlier tokens (prompt lookup decoding)."""
