"""Embeddings of n-grams of token ids, which gate a value into the residual streams (Qwen3.8-Flash-Next)."""
