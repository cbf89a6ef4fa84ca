"""The endpoints, one module an API."""
