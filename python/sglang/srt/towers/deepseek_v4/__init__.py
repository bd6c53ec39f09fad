"""Images of DeepSeek-V4-Flash-Vision: V4.1's encoder, with tokens in pairs of rows."""
