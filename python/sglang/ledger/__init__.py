"""The kernel ledger's tools: which variants are launched, what they need when compiled, and the rules that this must
obey."""
