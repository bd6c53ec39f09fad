"""Embeddings of n-grams of token texts (DeepSeek-V4.1): `ngram_embedding` with another hash and no convolution."""
