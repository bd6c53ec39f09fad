"""The encoder of Llama 4."""
