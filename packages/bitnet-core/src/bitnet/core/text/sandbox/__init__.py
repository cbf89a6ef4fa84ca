"""Jinja2 templates that are not trusted, rendered in helper processes with bounds on time, memory and what they write.

Jinja2's own sandbox keeps templates from the objects of Python, but lets them run and grow without end, and crash the
interpreter. A helper process can be limited and killed; :func:`render` looks like a function.
"""

from bitnet.core.text.sandbox.pool import Pool, as_json
from bitnet.core.text.sandbox.process import CPU_SECONDS, MEMORY, OUTPUT, SECONDS, TemplateError

__all__ = ["CPU_SECONDS", "MEMORY", "OUTPUT", "SECONDS", "Pool", "TemplateError", "as_json", "check", "render", "warm"]

_pool = Pool()
check, render, warm = _pool.check, _pool.render, _pool.warm
