"""Cross-origin requests of browsers (Fetch standard, section 3.3), with one policy for all responses.

Every process answers them, so this needs no framework. Engines send CORS headers of their own; a client gets
only the router's, else one response would have two policies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from functools import partial

from kvatlas.router.api.asgi import OwnAnswer
from kvatlas.router.http.asgi import Answering
from kvatlas.router.http.client_head import Header
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.settings import CorsSettings

_ALL_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY")
# Headers that pages may always set.
_SAFE_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
# Seconds for which a browser may keep the answer to a preflight.
_KEPT_S = 600
_PRIVATE_NETWORK = b"access-control-request-private-network"
_PREFLIGHT_VARY = (
    b"origin, access-control-request-method, access-control-request-headers, " + _PRIVATE_NETWORK
)


class Cors:
    """CORS in front of what answers."""

    def __init__(self, answer: Answering, settings: CorsSettings) -> None:
        self._answer = answer
        self.allow_all_origins = "*" in settings.allowed_origins
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in settings.allowed_origins)
        self._methods = _ALL_METHODS if "*" in settings.allowed_methods else settings.allowed_methods
        self._all_headers = "*" in settings.allowed_headers
        self._headers = sorted({*_SAFE_HEADERS, *settings.allowed_headers})
        self._credentials = settings.allow_credentials

    def answer(self, request: ClientRequest) -> Awaitable[None]:
        """Answer a preflight, or have the request answered with the policy in the answer's head."""
        fields = request.head.by_name
        origin = fields.get(b"origin")
        if origin is not None and request.head.method == "OPTIONS":
            method = fields.get(b"access-control-request-method")
            if method is not None:
                return self._preflight(origin, method, fields).answer(request)
        request.policy = partial(self._with_policy, origin)
        return self._answer(request)

    def _with_policy(self, origin: bytes | None, fields: list[Header]) -> list[Header]:
        fields = [field for field in fields if not _is_cors(*field)]
        vary = [value for name, value in fields if name.lower() == b"vary"]
        return [
            *(field for field in fields if field[0].lower() != b"vary"),
            *self._policy(origin),
            (b"vary", b", ".join([*vary, b"Origin"])),
        ]

    def _policy(self, origin: bytes | None) -> Iterable[Header]:
        """Header fields that say which page may read the answer."""
        if origin is None:
            return
        if self.allow_all_origins and not self._credentials:
            yield b"access-control-allow-origin", b"*"
        elif self._allows(origin):
            yield b"access-control-allow-origin", origin
        if self._credentials:
            yield b"access-control-allow-credentials", b"true"

    def _allows(self, origin: bytes) -> bool:
        return self.allow_all_origins or origin in self._origins

    def _preflight(self, origin: bytes, method: bytes, fields: dict[bytes, bytes]) -> OwnAnswer:
        """The answer to a browser that asks whether a request may be made."""
        wanted = fields.get(b"access-control-request-headers")
        known = {name.lower() for name in self._headers}
        named = {name.strip().lower() for name in (wanted or b"").decode("latin-1").split(",")}
        refused = {
            "origin": not self._allows(origin),
            "method": method.decode("latin-1") not in self._methods,
            "headers": wanted is not None and not self._all_headers and not named <= known,
            "private-network": _PRIVATE_NETWORK in fields,
        }
        said = [
            *self._policy(origin),
            (b"vary", _PREFLIGHT_VARY),
            (b"access-control-allow-methods", ", ".join(self._methods).encode()),
            (b"access-control-max-age", b"%d" % _KEPT_S),
        ]
        if not self._all_headers:
            said.append((b"access-control-allow-headers", ", ".join(self._headers).encode()))
        elif wanted is not None:
            said.append((b"access-control-allow-headers", wanted))
        failures = ", ".join(name for name, failed in refused.items() if failed)
        text = f"Disallowed CORS {failures}" if failures else "OK"
        return OwnAnswer(text.encode(), 400 if failures else 200, b"text/plain; charset=utf-8", tuple(said))


def _is_cors(name: bytes, value: bytes) -> bool:
    name = name.lower()
    return name.startswith(b"access-control-") or (name == b"vary" and value.strip().lower() == b"origin")
