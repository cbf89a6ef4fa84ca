"""Evaluation: how fast a model is here, how well the demo model answers, and whether an answer can be repeated."""
