"""Renders untrusted Jinja2 templates in helper processes with limits on time, memory and output.

Jinja2's own sandbox keeps templates away from Python's objects, but does not stop them from running forever, using up
memory, or crashing the interpreter. A helper process can be limited and killed; :func:`render` hides it behind a
function.
"""

from bitnet.core.text.sandbox.pool import Pool, as_json
from bitnet.core.text.sandbox.renderer import CPU_SECONDS, MEMORY, OUTPUT, SECONDS, TemplateError

__all__ = ["CPU_SECONDS", "MEMORY", "OUTPUT", "SECONDS", "Pool", "TemplateError", "as_json", "check", "render", "warm"]

_pool = Pool()
check, render, warm = _pool.check, _pool.render, _pool.warm
