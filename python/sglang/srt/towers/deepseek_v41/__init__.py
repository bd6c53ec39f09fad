"""The encoder of DeepSeek-V4.1."""
