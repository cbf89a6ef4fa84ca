"""Batches: files of requests in OpenAI's format, each answered as the server would have answered it.

``bitnet batch`` answers one file (:mod:`rows`, :mod:`run`). A server keeps files (:mod:`store`), and answers those that
its clients have sent (:mod:`batches`).
"""
