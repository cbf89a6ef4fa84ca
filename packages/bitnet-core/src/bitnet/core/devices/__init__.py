"""Devices: finds, probes and tests backends, and chooses and opens devices."""
