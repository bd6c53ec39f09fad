"""`sglang doctor`: finds what makes a machine with these GPUs hang or slow down, before a server meets it."""
