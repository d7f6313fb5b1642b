"""Selects the application for a request: own endpoints, the admin API, a sibling worker, or the proxy.

Data of the whole process group (metrics, ``/kvatlas/*``, the admin API) is served by the lead worker only;
other workers forward such requests (``to_lead``). CORS is allowed for the endpoints of clients: not for
data of the fleet or of other clients, and not for the admin API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.api.asgi import error_answer
from kvatlas.router.api.cors import Cors
from kvatlas.router.http.asgi import Answering, Application, call_asgi
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.settings import CorsSettings
from kvatlas.router.openai.apis import PROMPT_APIS
from kvatlas.router.openai.errors import (
    ApiError,
)
from kvatlas.router.proxy.paths import without_trailing_slashes

if TYPE_CHECKING:
    from kvatlas.router.api.admin_app import AdminApi
from kvatlas.router.api.app import CONTROL_PREFIX, TENANT, is_control, is_insight


class Front:
    """``control``: ``is_control`` paths of the public port; ``insight``: the same with everything of the ops
    port; ``ops_here``: the public port serves that too. ``to_lead`` returns None if this process is the lead,
    or the only one."""

    def __init__(
        self,
        proxy: Answering,
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
        self._cors = Cors(self._answered, cors) if cors.allowed_origins else None
        self._ops_here = ops_here
        self._to_lead = to_lead

    def answer(self, request: ClientRequest) -> Awaitable[None]:
        """Answer one request."""
        cors, path = self._cors, request.head.path
        # The most common paths need no further checks.
        for_clients = path in PROMPT_APIS
        if (
            cors is not None
            and (for_clients or not (is_insight(path) or self._admin_at(path)))
            # Caches must know that the origin matters, also without one.
            and (not cors.allow_all_origins or b"origin" in request.head.by_name)
        ):
            return cors.answer(request)
        return self._proxy(request) if for_clients else self._answered(request)

    def answer_whole(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Serve a request forwarded by a sibling, in the lead worker."""
        return (self._admin_at(scope["path"]) or self._insight)(scope, receive, send)

    def _admin_at(self, path: str) -> AdminApi | None:
        return self._admin if self._admin is not None and self._admin.here(path) else None

    def _answered(self, request: ClientRequest) -> Awaitable[None]:
        path = request.head.path
        if path not in PROMPT_APIS:
            if path.endswith("/") and not path.startswith(CONTROL_PREFIX):
                # Without a trailing slash for own endpoints; the proxy decides about other paths.
                meant = without_trailing_slashes(request.head)
                if is_control(meant.path):
                    request.head, path = meant, meant.path
            if is_control(path):
                return call_asgi(self._control_at(path), request)
            if (admin := self._admin_at(path)) is not None:
                return call_asgi(self._to_lead() or admin, request)
        return self._proxy(request)

    def _control_at(self, path: str) -> Application:
        if self._ops_here and is_insight(path):
            return self._to_lead() or self._insight
        return self._control if self._gate is None or not path.startswith("/v1/") else self._control_of_tenant

    async def _control_of_tenant(self, scope: Any, receive: Any, send: Any) -> None:
        """Restrict the list of models to authorised clients."""
        answer: Application = self._control
        try:
            scope = {**scope, TENANT: cast(KeyGate, self._gate).tenant_of(scope["headers"])}
        except ApiError as error:
            answer = error_answer(error, scope)
        await answer(scope, receive, send)
