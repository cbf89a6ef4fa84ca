"""An answer: its options, and its course from the prompt to the last token."""
