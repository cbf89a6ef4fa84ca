"""Evaluation: a model's speed on this machine, the demo model's accuracy, and whether an answer can be reproduced."""
