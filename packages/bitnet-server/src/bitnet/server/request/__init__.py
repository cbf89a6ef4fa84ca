"""One HTTP request: its body, its fields, and errors that name them."""
