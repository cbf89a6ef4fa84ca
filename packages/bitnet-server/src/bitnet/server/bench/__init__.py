"""Measures a server as its clients see it."""
