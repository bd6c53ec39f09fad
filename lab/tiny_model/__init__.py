"""Makes the embedded model: data, tokenizer, training and checks. See `python lab/tiny_model --help`."""
