"""The server on a Ray cluster: its application as Serve's ingress, engines as replicas on the cluster's nodes.

``bitnet serve --ray``, ``bitnet batch --ray`` and :mod:`bitnet.server.data` import this package, nothing else does.
``ray`` comes with ``bitnet-server[ray]``.

One request: Serve's proxy → :mod:`ingress` (the application: bodies, templates, tokens) → :mod:`router` (which replica)
→ :mod:`engine` (a model on a device) → chunks back the same way.
"""

from __future__ import annotations

import os

# Under `uv run`, Ray would have each replica copy the working directory and install its packages anew.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
