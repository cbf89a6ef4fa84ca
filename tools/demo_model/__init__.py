"""The embedded demo model: its training data, tokenizer, training and export. See README.md."""
