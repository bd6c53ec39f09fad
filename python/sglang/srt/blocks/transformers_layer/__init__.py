"""Layers whose code is a class of transformers, over our attention, caches, products and experts."""
