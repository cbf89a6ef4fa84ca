"""Devices: backends found, probed, tried in child processes, chosen and opened."""
