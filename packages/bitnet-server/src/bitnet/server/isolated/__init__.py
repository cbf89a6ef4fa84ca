"""A model in a process of its own, whose crash takes no other model."""
