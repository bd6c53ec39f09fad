"""The encoder of Qwen2.5-VL."""
