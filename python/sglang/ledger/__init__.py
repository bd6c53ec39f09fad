"""The tools of the kernel ledger: what is launched, what it costs when compiled, and the rules that this must obey."""
