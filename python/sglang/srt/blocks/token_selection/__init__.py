"""The selection of tokens for all heads of grouped-query attention (Naive-N0.5)."""
