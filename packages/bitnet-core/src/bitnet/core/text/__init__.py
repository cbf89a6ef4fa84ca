"""Text: tokenizers, their vocabularies, chat templates, and the sandbox that renders them."""
