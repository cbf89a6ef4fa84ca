"""Batches: files of requests in OpenAI's format, each answered by the server's application without a server."""
