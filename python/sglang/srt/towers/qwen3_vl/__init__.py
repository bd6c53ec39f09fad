"""The encoder of Qwen3-VL, Qwen3.5 and later."""
