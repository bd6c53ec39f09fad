"""Attention of grouped queries to regions of tokens that each KV head selects by pooled keys (Step-5)."""
