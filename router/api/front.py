"""Which application answers a request: own endpoints, the admin API, a sibling worker, or the proxy.

What shows the whole process group (metrics, ``/kvatlas/*``, the admin API) is answered by the lead of the
workers alone; another worker passes such a request on (``to_lead``). What browsers may ask from other origins
is what clients ask: nothing of the fleet, nothing of other clients, nothing of the admin API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from router.admission.gate import KeyGate
from router.api.admin.app import AdminApi
from router.api.app import CONTROL_PREFIX, TENANT, error_answer, is_control
from router.http.server.cors import Cors, CorsSettings
from router.openai.apis import PROMPT_APIS
from router.openai.errors import ApiError
from router.proxy.paths import without_trailing_slashes

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI 3."""


class Front:
    """``control``: what ``is_control`` names, on the public port; ``insight``: the same with all that the ops
    port shows; ``ops_here``: the public port shows that too. ``to_lead`` gives None while this process is the
    lead, or alone."""

    def __init__(
        self,
        proxy: Application,
        control: Application,
        insight: Application,
        *,
        admin: AdminApi | None,
        gate: KeyGate | None,
        cors: CorsSettings,
        ops_here: bool,
        to_lead: Callable[[], Application | None],
    ) -> None:
        self._proxy = proxy
        self._control = control
        self._insight = insight
        self._admin = admin
        self._gate = gate
        self._cors = Cors(self._answer, cors) if cors.allowed_origins else None
        self._ops_here = ops_here
        self._to_lead = to_lead

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Answer one request (ASGI 3, "http" or "websocket")."""
        cors = self._cors
        if cors is not None and self._for_browsers(scope) and cors.concerns(scope):
            return cors(scope, receive, send)
        return self._answer(scope, receive, send)

    def answer_whole(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """What siblings pass on, at the lead."""
        return (self._admin_at(scope["path"]) or self._insight)(scope, receive, send)

    def _for_browsers(self, scope: Any) -> bool:
        path = scope["path"]
        if path in PROMPT_APIS:  # of what clients ask for most nothing more is asked
            return True
        return scope["type"] == "http" and not (_is_insight(path) or self._admin_at(path))

    def _admin_at(self, path: str) -> AdminApi | None:
        return self._admin if self._admin is not None and self._admin.here(path) else None

    def _answer(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Chosen without being waited for: what is awaited is the application that answers."""
        if scope["path"] not in PROMPT_APIS and scope["type"] == "http":
            if scope["path"].endswith("/") and not scope["path"].startswith(CONTROL_PREFIX):
                scope = _as_meant(scope)
            if is_control(scope["path"]):
                return self._answer_control(scope, receive, send)
            if (admin := self._admin_at(scope["path"])) is not None:
                return (self._to_lead() or admin)(scope, receive, send)
        return self._proxy(scope, receive, send)

    async def _answer_control(self, scope: Any, receive: Any, send: Any) -> None:
        """Which models there are is told to those who may use them."""
        if self._gate is not None and scope["path"].startswith("/v1/"):
            try:
                scope = {**scope, TENANT: self._gate.tenant_of(scope["headers"])}
            except ApiError as error:
                await error_answer(error)(scope, receive, send)
                return
        passed = self._to_lead() if self._ops_here and _is_insight(scope["path"]) else None
        await (passed or self._control)(scope, receive, send)


def _as_meant(scope: Any) -> Any:
    """Own endpoints answer with and without a slash at the end; of other paths the proxy decides."""
    meant = without_trailing_slashes(scope)
    return meant if is_control(meant["path"]) else scope


def _is_insight(path: str) -> bool:
    """Whether it tells of the fleet and of other clients."""
    return path == "/metrics" or path.startswith(CONTROL_PREFIX)
