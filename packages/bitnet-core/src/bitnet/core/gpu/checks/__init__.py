"""Checks that a device computes correctly and replays correctly, and the record of those that passed."""
