"""A conversation: its messages, its tools, the prompt made of them, and the calls in an answer."""
