"""Utilities for all other folders: environment variables, logging, files, the kernel cache, driver libraries."""
