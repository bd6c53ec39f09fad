"""Makes the embedded model: data, tokenizer, training and checks. See `python scripts/tiny_model --help`."""
