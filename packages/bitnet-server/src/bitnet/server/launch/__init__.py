"""Starts a server and, with the right variables, a programming agent that uses it."""
