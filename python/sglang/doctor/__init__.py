"""`sglang doctor`: what makes a machine with these GPUs hang or crawl, said before the server meets it."""
