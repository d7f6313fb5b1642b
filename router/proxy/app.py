"""The proxied path: reads the request whole, has it forwarded, answers errors.

No framework in between: bytes in, bytes out. The request body is forwarded byte-identical, but for fields
that only the router may send and for ids of responses; of the two
completion endpoints it is peeked at (model, stream), of other JSON bodies leniently. Everything a client sees
that is not an engine's own answer is an ``ApiError`` in OpenAI's shape and carries the request id.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar, cast

from kvatlas.router.admission.claims import (
    ENGINE_PRIORITY,
    Targets,
    capped,
    given_priority,
    lowest_priority,
    read_claim,
)
from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.isolation import Isolation
from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.admission.tenants import TenantRequest
from kvatlas.router.http.client_head import ClientHead, Header
from kvatlas.router.http.refusal_log import RefusalLog
from kvatlas.router.http.request_cycle import ClientRequest, answer_whole, request_id_of
from kvatlas.router.http.upstream_pool import UpstreamClient
from kvatlas.router.observe.requests import RequestRecord, RequestTracker
from kvatlas.router.openai.apis import PROMPT_APIS, RESPONSES, SALTED, UNCACHED
from kvatlas.router.openai.body import Peek, invalid_json, peek_any_size
from kvatlas.router.openai.error_bodies import error_body
from kvatlas.router.openai.errors import (
    ApiError,
    bad_request,
    body_too_complex,
    body_too_large,
    encoding_not_supported,
    id_in_use,
    method_not_allowed,
    path_not_kept_apart,
    path_not_proxied,
    response_not_found,
    unknown_path,
)
from kvatlas.router.openai.forms import Form, form_type, read_form
from kvatlas.router.openai.members import (
    STEPS_MAX,
    TooManyStepsError,
    run_cooperatively,
    with_value,
)
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.openai.response_ids import FIELD, PREFIX, ResponseIds
from kvatlas.router.openai.sessions import SESSION
from kvatlas.router.pd.settings import PdSettings, PdStats
from kvatlas.router.prompts.bodies import peek_chat
from kvatlas.router.proxy.aliases import Aliases
from kvatlas.router.proxy.carriers import Outbound
from kvatlas.router.proxy.continuation_plan import ContinuationPlan, plan_of
from kvatlas.router.proxy.deaths import Deaths, Pulse, WatchedFleet
from kvatlas.router.proxy.forward import Forwarder, Placer
from kvatlas.router.proxy.headers import CONTINUE, RequestHead, read_request_headers
from kvatlas.router.proxy.media_names import names_media
from kvatlas.router.proxy.paths import (
    POST_PATHS,
    Verdict,
    judge,
    keeps_nothing,
    remedy,
    response_named,
    without_trailing_slashes,
)
from kvatlas.router.proxy.screen import Rules, may_be_object, screen, screen_form
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from kvatlas.router.proxy.stream_usage import ASKED, with_usage

T = TypeVar("T")
_CHOSEN_ID = frozenset({FIELD})
PIN = b"x-kvatlas-engine"
"""A client's choice of an engine; the same name tells it in the answer."""
_NO_PEEK = Peek()
_UNREAD = Peek(guarded=True, prioritized=True)
_LARGE_BYTES = 4 * 1024 * 1024
_POST = frozenset({"POST", "OPTIONS"})


class _ClientGoneError(Exception):
    """The client left while its request was still being read."""


class ProxyApp:
    """Answers everything that engines do. ``close`` it in the loop it ran in. ``claims``:
    what requests say of their turn is read, for where they may have to wait."""

    def __init__(
        self,
        planner: Placer,
        settings: ProxySettings | None = None,
        stats: ProxyStats | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        requests: RequestTracker | None = None,
        gate: KeyGate | None = None,
        aliases: Aliases | None = None,
        tls: ssl.SSLContext | None = None,
        claims: bool = False,
        targets: Targets | None = None,
        responses: ResponseIds | None = None,
        pd: PdSettings | None = None,
        pd_stats: PdStats | None = None,
        watched: WatchedFleet | None = None,
        silence_s: float = 0.0,
    ) -> None:
        settings, pd = settings or ProxySettings(), pd or PdSettings()
        self.stats = stats or ProxyStats()
        self.pd_stats = pd_stats or PdStats()
        self.requests = requests or RequestTracker(clock)
        self._refusals = RefusalLog(clock)
        self._gate = gate
        self._planner = planner
        self._responses = responses
        self.client = UpstreamClient(settings, self.stats, clock, tls)
        self.deaths = None if watched is None else Deaths(watched, Pulse(self.client), self.stats, clock)
        self._forwarder = Forwarder(
            planner,
            self.client,
            settings=settings,
            stats=self.stats,
            clock=clock,
            pd=pd,
            pd_stats=self.pd_stats,
            deaths=self.deaths,
        )
        self.configure(settings, pd, aliases, claims=claims, targets=targets, silence_s=silence_s)

    def configure(
        self,
        settings: ProxySettings,
        pd: PdSettings,
        aliases: Aliases | None,
        *,
        claims: bool,
        targets: Targets | None = None,
        silence_s: float = 0.0,
    ) -> None:
        """Set the settings of new requests and new connections."""
        self.settings = settings
        self._forwarder.silence_s = silence_s
        self._forwarder.configure(settings, pd)
        self.client.configure(settings)
        self._aliases = aliases
        self._claims = claims or targets is not None
        self._targets = targets
        self._rules = Rules(
            not settings.trust_client_kv_transfer_params,
            settings.kv_cache_report_mode,
            # Trust covers transfers between engines, not what belongs to other tenants.
            names=self._gate is not None,
        )

    def close(self) -> None:
        """Close all connections to engines, and count all ended requests."""
        self.requests.books.settle()
        if self.deaths is not None:
            self.deaths.close()
        self.client.close()

    async def answer(self, request: ClientRequest) -> None:
        """Answer one request."""
        head = request.head
        slash = head.path.endswith("/") and head.path not in self.settings.passed_paths
        head = without_trailing_slashes(head) if slash else head
        self.stats.requests += 1
        self.stats.requests_active += 1
        request_id: bytes | None = None
        record = self.requests.begin(head.method, head.path)
        entry: TenantRequest | None = None
        gate = self._gate
        try:
            sent = head.fields
            if self.requests.traces is not None:
                self.requests.trace(record, sent)
            # Without what must not reach engines.
            head = head if gate is None else head.with_fields(gate.for_engines(head.fields))
            fields = read_request_headers(head, request.peer)
            request_id = fields.request_id
            record.request_id, record.session = request_id.decode("latin-1"), fields.session
            if gate is not None:
                tenant, record.key_id = gate.owner_of(sent)
                record.tenant = tenant.name
                entry = gate.enter(tenant)
                fields.fields = capped(fields.fields, entry.tenant.rules)
            if head.method != "POST" or head.path not in PROMPT_APIS or fields.encoding:
                self._check(head.path, head.method, fields)
            body = request.complete_body()
            if body is None or len(body) > self.settings.body_bytes_max:
                body = await self._read_body(request, fields, body)
            record.read_s, record.bytes_in = self.requests.clock(), len(body)
            out = await self._outbound(request, head, fields, body, record, entry)
            if self.settings.continue_streams and out.request.stream and out.carrier is None:
                out.plan = self._plan(out)
            # What it costs must be known where there are bills.
            if out.request.stream and (entry is not None or self.requests.on_end is not None):
                await self._ask_usage(out)
            request.watch()
            await self._forwarder.forward(out)
        except ApiError as error:
            await self._answer_error(request, error, request_id, record)
        except _ClientGoneError:
            self.stats.clients_gone += 1
            record.gone = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not request.disconnected or task is None:
                raise
            task.uncancel()
            self.stats.clients_gone += 1
            record.gone = True
        finally:
            request.unwatch()
            if entry is not None:
                entry.leave(
                    record.usage,
                    served=record.served,
                    asked=bool(record.engine),
                    streamed=record.generated_tokens or 0,
                )
                record.charged_tokens = entry.charged_tokens
            self.stats.requests_active -= 1
            self.requests.end(record)

    def _check(self, path: str, method: str, head: RequestHead) -> None:
        """Refuse what can be refused before the body is read."""
        if path not in PROMPT_APIS:
            verdict = judge(path, self.settings.refused_paths, self.settings.passed_paths)
            if verdict is Verdict.UNKNOWN:
                raise unknown_path(path, remedy=remedy(path))
            if verdict is Verdict.REFUSE:
                self.stats.paths_refused += 1
                raise path_not_proxied(path)
        if path in POST_PATHS and method not in _POST:
            raise method_not_allowed(method, path, "POST")
        if head.encoding:
            raise encoding_not_supported(head.encoding.decode("latin-1"))

    async def _outbound(
        self,
        client: ClientRequest,
        head: ClientHead,
        fields: RequestHead,
        body: bytes,
        record: RequestRecord,
        entry: TenantRequest | None,
    ) -> Outbound:
        path, method = head.path, head.method
        form, seen, prompts = None, body, path in PROMPT_APIS
        found = None if prompts or not body else await self._form(head.fields, body)
        if found is not None:
            form, look = found
        else:
            look = peek_chat(path, body) or await self._peek(path, method, body)
        earlier = None if prompts else response_named(method, path)
        reads_response = earlier is not None
        if earlier is None and path.startswith(RESPONSES):
            earlier = look.previous_response
        if entry is not None:
            self._check_tenant(path, method, look, earlier, entry)
        model, session = look.model, fields.session or look.session
        if self._aliases is not None and (behind := self._aliases.model_for(model, session)):
            named = with_value(body, b"model", behind) if form is None else form.with_value("model", behind)
            model, body = behind, await self._changed(named)
        number = look.priority
        if entry is not None and form is None and (look.prioritized or self._engine_priorities):
            body, number = await self._prioritized(path, method, body, look, entry.tenant.rules)
        ids = self._responses if path == RESPONSES else None
        if look.guarded or look.request_id is not None:
            body = await self._screen(body, entry, _CHOSEN_ID if ids is not None else frozenset())
        isolation, cache_group = None if self._gate is None else self._gate.isolation, ""
        if isolation is not None and entry is not None and method == "POST" and body:
            body, cache_group = await self._isolated(isolation, path, body, entry, is_form=form is not None)
        target = b"%b?%b" % (head.raw_path, head.query) if head.query else head.raw_path
        prioritized = number or ENGINE_PRIORITY in head.by_name
        request = InboundRequest(
            method,
            path,
            head.query,
            head.fields,
            body,
            model,
            look.stream,
            fields.request_id,
            client=hash(record.tenant or tuple(fields.forwarded_for.rsplit(b",", 2)[-2:])),
            trace=record.trace,
            pinned=_pinned(head.fields) if self.settings.pin_header else None,
            tenant=record.tenant,
            isolated=isolation is not None,
            cache_group=cache_group,
            session=session,
            earlier_response=earlier,
            reads_response=reads_response,
            response_id="" if ids is None else ids.make(record.tenant, record.key_id),
            read_s=record.read_s,
            priority=given_priority(fields.fields, number) if prioritized else 0,
            prompt=look.prompt if body is seen else None,
        )
        record.session = session
        if session is not None and SESSION not in dict(fields.fields):
            # vLLM 0.32 and 0.33 show it in their KV events.
            fields.fields.append((SESSION, session.id.encode()))
        if self._claims or (entry is not None and entry.tenant.rules.has_wait_targets):
            request.claim = read_claim(
                head.fields,
                in_body=look.priority,
                arrived_s=record.arrived_s,
                tenant=record.tenant,
                rules=None if entry is None else entry.tenant.rules,
                targets=self._targets,
            )
        record.model, record.streams = model or "", look.stream
        if (carrier := client.carrier) is not None:
            request.among, request.carried = carrier.among, carrier.carried
        return Outbound(client, request, fields, target, record, entry, carrier, seen)

    def _check_tenant(
        self, path: str, method: str, look: Peek, earlier: str | None, entry: TenantRequest
    ) -> None:
        """Raises ``ApiError`` for what is not this tenant's: a model (403), a response (404), or what engines
        do not keep apart by tenant (403)."""
        if earlier is not None and not self._owns(earlier, entry):
            raise response_not_found(earlier)
        if response_named(method, path) is not None:
            return
        if not (method == "POST" and keeps_nothing(path)) and path not in self.settings.passed_paths:
            self.stats.paths_refused += 1
            raise path_not_kept_apart()
        if method == "POST":
            entry.tenant.allow(look.model)
        chosen = look.request_id if path.startswith(RESPONSES) else None
        if chosen is not None and chosen.startswith(PREFIX) and not self._owns(chosen, entry):
            raise id_in_use(chosen)

    def _owns(self, response_id: str, entry: TenantRequest) -> bool:
        return self._responses is not None and self._responses.is_of(response_id, entry.tenant.name)

    async def _prioritized(
        self, path: str, method: str, body: bytes, look: Peek, rules: TenantRules
    ) -> tuple[bytes, int | None]:
        """The body with a ``priority`` that the tenant's class allows, and that number."""
        lowest, given = lowest_priority(rules), look.priority
        if look.prioritized:
            if lowest is None or (given is not None and given >= lowest):
                return body, given
            return await self._changed(with_value(body, b"priority", lowest)), lowest
        if not (rules.priority != "normal" and method == "POST" and path in PROMPT_APIS):
            return body, None
        own = -1 if lowest is None else lowest
        return await self._changed(with_value(body, b"priority", own, adds=True)), own

    async def _isolated(
        self, isolation: Isolation, path: str, body: bytes, entry: TenantRequest, *, is_form: bool
    ) -> tuple[bytes, str]:
        """The body with the salt of its tenant or group, and the group; "" if the client's own salt separates
        it further. Raises ``ApiError`` (400)."""
        if path in UNCACHED or response_named("POST", path) is not None:
            return body, ""
        passed = path in self.settings.passed_paths and path not in SALTED
        if not passed:
            named = not is_form and await self._changed(names_media(body))
            isolation.check(path, is_form=is_form, names_media=named)
        elif is_form:
            return body, ""
        tenant = entry.tenant
        salt = partial(isolation.salt, tenant.name, tenant.rules)
        salted = await self._changed(with_value(body, b"cache_salt", salt, adds=True))
        if salted is body and not passed:
            # Not read here, but perhaps by an engine: it would go there without a salt.
            raise invalid_json(ValueError("its members cannot be read"))
        own = b"cache_salt" in body
        return salted, "" if own else ":".join(isolation.group(tenant.name, tenant.rules))

    async def _ask_usage(self, out: Outbound) -> None:
        """Ask for the usage of a stream, and hide it from a client that has not asked. A gateway has the
        client: nothing can be taken out of its stream."""
        request = out.request
        if request.path in ASKED and out.carrier is None:
            asked = await self._changed(with_usage(request.body))
            if asked is not request.body:
                request.body, request.hides_usage = asked, True

    def _plan(self, out: Outbound) -> ContinuationPlan | str:
        """How its stream may go on from another engine, or why not (a label)."""
        request = out.request
        if dict(request.headers).get(CONTINUE, b"").strip().lower() == b"off":
            return "client"
        if len(request.body) > _LARGE_BYTES:
            return "size"
        if self._planner.decode(request.model or "", (), skips_special=True) is None:
            return "tokenizer"
        return plan_of(request.path, request.body, parses=self.settings.continue_tools)

    async def _form(self, fields: list[Header], body: bytes) -> tuple[Form, Peek] | None:
        """The form that the body is, and what is needed of it; None: it is none."""
        try:
            kind = form_type(fields)
            if kind is None:
                return None
            form = await self._changed(read_form(kind, body))
            await self._changed(screen_form(form, self._rules))
            return form, form.look()
        except ApiError:
            self.stats.forms_refused += 1
            raise

    @property
    def _engine_priorities(self) -> bool:
        return self._gate is not None and self._gate.engine_priorities

    @staticmethod
    async def _changed(steps: Generator[None, None, T]) -> T:
        try:
            return await run_cooperatively(steps)
        except TooManyStepsError:
            raise body_too_complex(STEPS_MAX) from None

    async def _screen(self, body: bytes, entry: TenantRequest | None, also: frozenset[bytes]) -> bytes:
        may_use = (lambda model: True) if entry is None else entry.tenant.may_use
        found = await self._changed(screen(body, self._rules, may_use, also))
        self.stats.kv_transfer_params_removed += found.transfer > 0
        return found.body

    async def _read_body(self, request: ClientRequest, head: RequestHead, whole: bytes | None) -> bytes:
        """``whole``: the body, if all of it has come already. Raises ``ApiError`` if it is too large."""
        limit = self.settings.body_bytes_max
        if whole is not None or (head.content_length is not None and head.content_length > limit):
            raise self._too_large()
        body: bytes | bytearray = b""
        while (came := await request.read()) is not None:
            piece, more = came
            if len(body) + len(piece) > limit:
                raise self._too_large()
            if not body:
                body = piece
            elif piece:
                body = body if isinstance(body, bytearray) else bytearray(body)
                body += piece
            if not more:
                # A large one stays what it was received in: copying it would hold the loop.
                return bytes(body) if len(body) < _LARGE_BYTES else cast(bytes, body)
        raise _ClientGoneError

    def _too_large(self) -> ApiError:
        self.stats.bodies_too_large += 1
        error = body_too_large(self.settings.body_bytes_max)
        error.headers = (*error.headers, (b"connection", b"close"))  # the rest of the body is not read
        return error

    @staticmethod
    async def _peek(path: str, method: str, body: bytes) -> Peek:
        completion = method == "POST" and path in PROMPT_APIS
        if completion and not body:
            raise bad_request("invalid_json", "The request body is empty; a JSON object is expected.")
        if not completion and not may_be_object(body):
            return _NO_PEEK
        try:
            return await peek_any_size(body)
        except ApiError:
            if completion:
                raise
            return _UNREAD  # the engine knows what its other endpoints take

    async def _answer_error(
        self, request: ClientRequest, error: ApiError, request_id: bytes | None, record: RequestRecord
    ) -> None:
        self.stats.count_error(error.status, error.code)
        if request_id is None:
            request_id = request_id_of(request.head.fields)
            record.request_id = request_id.decode("latin-1")
        if error.status < 500:
            self._refusals.note(error, request_id, path=record.path, tenant=record.tenant, model=record.model)
        elif not record.explained:
            self.requests.warn(
                "request not served",
                record,
                error.code,
                status=error.status,
                code=error.code,
                path=record.path,
            )
        body = error_body(error, record.path)
        record.status, record.bytes_out = error.status, len(body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *error.headers,
            (b"x-request-id", request_id),
        ]
        await answer_whole(request, error.status, headers, body)


def _pinned(fields: list[Header]) -> str | None:
    return next((value.decode("latin-1") for name, value in fields if name == PIN), None)
