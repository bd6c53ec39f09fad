"""The gated delta net (arXiv 2412.06464)."""
