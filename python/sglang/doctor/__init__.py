"""`sglang doctor`: finds causes of hangs and slowness on a machine with these GPUs before a server meets them."""
