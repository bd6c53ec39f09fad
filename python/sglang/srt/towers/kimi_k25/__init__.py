"""The encoder of Kimi K2.5, MoonViT."""
