"""Who may call the server: keys, host names, and pages of other sites."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from bitnet.core.errors import brief
from bitnet.server.http.routes import Endpoint
from bitnet.server.models.settings import Settings
from bitnet.server.request.call import Scope
from bitnet.server.request.errors import RequestError


class Access:
    """The rules of access.

    Args:
        local: Whether the server listens only on this machine. Without keys, it then accepts only this machine's own
            host names. Otherwise a web page could use DNS rebinding to pass as the server's own.
    """

    def __init__(self, settings: Settings, *, local: bool) -> None:
        self._cors = settings.cors
        self._local = local and not settings.api_keys
        self.keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    def locked(self, endpoint: Endpoint, scope: Scope) -> RequestError | None:
        """An error if a request has no access: it comes from another site's page, or its key is missing or wrong."""
        guarded = endpoint.works or endpoint.methods != ("GET",)
        if guarded and self._foreign(dict(scope["headers"]), scope):
            return RequestError(403, "Pages of other sites may not call this server (--cors allows one).")
        if endpoint.public or not self.keys or self.owner(scope):
            return None
        return RequestError(401, "The API key is missing or wrong.", code="invalid_api_key")

    def owner(self, scope: Scope) -> bytes:
        """The digest of the request's key; empty if that is not one of the server's."""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key).digest()
        return digest if key and sum(hmac.compare_digest(digest, known) for known in self.keys) else b""

    def misnamed(self, scope: Scope) -> RequestError | None:
        """An error if the request's host name is not one of this server."""
        name = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self._local or not name or _is_local(name):
            return None
        allowed = self._cors
        if "*" in allowed or any(origin.partition("://")[2] == name for origin in allowed):
            return None
        return RequestError(
            403,
            f"Without a key, this server answers only to localhost, not to {brief(name)}: "
            "set one (--api-key-file), or allow that site's pages (--cors https://…).",
        )

    def _foreign(self, headers: Mapping[bytes, bytes], scope: Scope) -> bool:
        """Whether the browser's headers say that a page of another site sends this.

        A GET without CORS, as for an image, has no ``Origin``; programs that are no browser send neither header.
        """
        if self.allowed_origin(scope) or "*" in self._cors:
            return False
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            return site not in (b"same-origin", b"none")
        origin = headers.get(b"origin")
        return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")

    def headers(self, scope: Scope) -> dict[str, str]:
        """The headers by which a browser lets another site's page read an answer."""
        headers: dict[str, str] = {}
        if origin := self.allowed_origin(scope):
            wanted = dict(scope["headers"]).get(b"access-control-request-headers", b"").decode("latin-1")
            headers |= {
                "access-control-allow-origin": origin,
                "access-control-allow-headers": wanted or "authorization, content-type, x-api-key, anthropic-version",
                "access-control-allow-methods": "GET, POST, DELETE",
                "access-control-expose-headers": "retry-after, x-bitnet-device",
                "vary": "origin, access-control-request-headers",
            }
        return headers

    def allowed_origin(self, scope: Scope) -> str | None:
        """The origin of a page that may call the server; None for all others."""
        origin = dict(scope["headers"]).get(b"origin", b"").decode("latin-1")
        allowed = self._cors
        here = "localhost" in allowed and _is_of_this_machine(origin)
        return origin if origin and (here or origin in allowed or "*" in allowed) else None

    def is_preflight(self, scope: Scope) -> bool:
        """Whether a browser asks what another site's page may do. The answer's headers say it, not its status."""
        return bool(self._cors) and scope["method"] == "OPTIONS" and b"origin" in dict(scope["headers"])


def _is_of_this_machine(origin: str) -> bool:
    """Whether an origin is a page that this machine serves, at any port."""
    scheme, _, name = origin.partition("://")
    return scheme in ("http", "https") and _is_local(name)


def _is_local(name: str) -> bool:
    """Whether a ``Host`` header names only this machine: ``localhost`` or a loopback address."""
    try:
        host = urlsplit(f"//{name}").hostname or ""
        return host.removesuffix(".") == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
