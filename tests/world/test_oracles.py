"""Each oracle sees a defect that is put into the product or into the engine, and objects to nothing without
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.simulator.api_protocol import EngineError
from kvatlas.publisher.simulator.http_app import EngineApp
from kvatlas.publisher.simulator.model import EngineModel, TextSource
from kvatlas.publisher.simulator.stepper import Stepper
from kvatlas.publisher.simulator.tokenizer import AnswerText
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.admission.admission_queue import AdmissionQueue
from kvatlas.router.admission.isolation import Isolation
from kvatlas.router.admission.tenants import Tenant
from kvatlas.router.http.downstream import DownstreamConnection
from kvatlas.router.http.request_cycle import RequestCycle
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.placement.engine_order import BAND_MS, EngineOrder
from kvatlas.router.placement.load import LoadAccount
from kvatlas.router.proxy.app import ProxyApp
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.members import Membership
from tests.world import kinds, oracles
from tests.world.plan import ClientRequest, Fault, Plan
from tests.world.truth import TRUTH_LENGTH_MAX
from tests.world.world import Report, play

Patch = Callable[[pytest.MonkeyPatch], None]
_SEEDS = {"plain": 4, "tenants": 5, "replicas": 1, "agents": 2, "order": 8}
"""Of each kind, one whose engines are slow enough for its requests to meet."""


def small(kind: str = "plain", *, requests: int = 16, **changes: Any) -> Plan:
    plan = kinds.draw(_SEEDS[kind], kind, requests=requests, faults=False)
    staying = tuple(msgspec.structs.replace(one, leaves_s=None) for one in plan.requests)
    return msgspec.structs.replace(plan, requests=staying, **changes)


def waiting() -> Plan:
    """After a first request two prompts with one beginning wait in an engine that computes one at a time."""
    plan = small("order")
    (engine, *_) = plan.engines
    requests = [
        ClientRequest(at_s=at_s, api="tokens", story=story, length=1000, client=number)
        for number, (at_s, story) in enumerate(((0.0, 3), (3.0, 0), (3.1, 1), (3.2, 1)))
    ]
    slow = {**engine, "groups": "full", "prefill_s_per_token": 1e-3, "max_num_seqs": 1}
    return msgspec.structs.replace(plan, engines=(slow,), requests=tuple(requests))


def seen(report: Report, oracle: str, text: str = "") -> bool:
    return any(one.oracle == oracle and text in one.text for one in report.violations)


def around(owner: type, name: str, wrap: Callable[[Any], Any]) -> Patch:
    """Replace a method by what ``wrap`` makes of it."""
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def silenced(real: Any) -> Any:
    """Tokens of each fifth request never come."""

    def deliver(self: Stepper, output: Any) -> None:
        if sum(output.request.prompt) % 5:
            real(self, output)
        elif output.finish_reason is not None:
            del self._generations[output.request]

    return deliver


def failing(real: Any) -> Any:
    def prepared(self: EngineModel, request: Any, token_ids: list[int], limit: int | None) -> Any:
        if sum(token_ids) % 5 == 0 and self.max_model_len < TRUTH_LENGTH_MAX:
            raise EngineError(HTTPStatus.IM_A_TEAPOT, "not today")
        return real(self, request, token_ids, limit)

    return prepared


def repeated(times: int) -> Callable[[Any], Any]:
    """The method is called several times for once."""

    def wrap(real: Any) -> Any:
        def again(self: Any, *args: Any, **more: Any) -> Any:
            for _ in range(times - 1):
                real(self, *args, **more)
            return real(self, *args, **more)

        return again

    return wrap


def nothing(_real: Any) -> Any:
    return lambda self, *args, **more: None


def other_text(real: Any) -> Any:
    """One engine of the fleet runs another model under the same name."""

    def begin(self: EngineModel, settings: Any, max_model_len: int) -> None:
        real(self, settings, max_model_len)
        if settings.host == "10.0.0.1":
            self._source = TextSource(self._tokenizer, seed=99, natural_tokens_max=256)

    return begin


def cut_text(real: Any) -> Any:
    """Streams lack the text of their last event."""

    def take(self: AnswerText, *, finished: bool) -> str:
        return "" if finished else str(real(self, finished=finished))

    return take


def after_the_end(real: Any) -> Any:
    """A response has more bytes than it says."""

    def complete(self: DownstreamConnection, *, keep_alive: bool) -> None:
        self.transport.write(b"and another thing")
        real(self, keep_alive=keep_alive)

    return complete


def endless(real: Any) -> Any:
    """Each fifth request is never answered."""
    begun = 0

    async def run(self: RequestCycle, *args: Any) -> None:
        nonlocal begun
        begun += 1
        if begun % 5 == 0:
            await asyncio.sleep(1e4)
        await real(self, *args)

    return run


def twins(real: Any) -> Any:
    """The prompt of one request is computed twice."""

    def sim_requests(self: EngineModel, request_id: str, prepared: Any) -> Any:
        return [*real(self, request_id, prepared), *real(self, request_id, prepared)]

    return sim_requests


def charged_twice(real: Any) -> Any:
    charging = False

    def charge(self: AdmissionQueue, *args: Any) -> Any:
        nonlocal charging
        if not charging:
            charging = True
            self.charge(*args)
            charging = False
        return real(self, *args)

    return charge


def ill_after_a_while(real: Any) -> Any:
    def answer(self: EngineApp, call: Any) -> Any:
        if asyncio.get_running_loop().time() > _ILL_AT_S:
            raise EngineError(HTTPStatus.SERVICE_UNAVAILABLE, "not today")
        return real(self, call)

    return answer


_ILL_AT_S = 1002.0


def begin_with(extra: Callable[[], object]) -> Callable[[Any], Any]:
    """Something is done at the beginning of each request."""

    def wrap(real: Any) -> Any:
        def begin(self: RequestTracker, *args: Any) -> Any:
            extra()
            return real(self, *args)

        return begin

    return wrap


def leave_a_task() -> None:
    asyncio.get_running_loop().create_task(asyncio.sleep(1e6), name="left")


def leave_a_timer() -> None:
    asyncio.get_running_loop().call_later(1e6, print)


def raise_later() -> None:
    def fail() -> None:
        raise RuntimeError("unhandled")

    asyncio.get_running_loop().call_soon(fail)


def many_calls() -> None:
    def call() -> None: ...

    for _ in range(oracles.CALLS_MAX + 1):
        call()


def failing_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """The second engine fails for a while."""
    begin, prepared = EngineModel.__init__, EngineModel._prepared

    def init(self: EngineModel, settings: Any, max_model_len: int) -> None:
        begin(self, settings, max_model_len)
        self.host = settings.host  # type: ignore[attr-defined]

    def fail(self: EngineModel, *args: Any) -> Any:
        if self.host == "10.0.0.2" and asyncio.get_running_loop().time() < _ILL_AT_S:  # type: ignore[attr-defined]
            raise EngineError(HTTPStatus.IM_A_TEAPOT, "not today")
        return prepared(self, *args)

    patch.setattr(EngineModel, "__init__", init)
    patch.setattr(EngineModel, "_prepared", fail)


def kept(_real: Any) -> Any:
    """Leases are not released."""

    async def release(self: Leases, engine_id: str, token: int) -> bool:
        return True

    return release


def quietly(_real: Any) -> Any:
    async def leave(self: Any) -> None: ...

    return leave


def lost_unseen(_real: Any) -> Any:
    """Leases run out, and their holders do not hear of it."""

    async def renew(self: Leases, tokens: Any) -> set[str]:
        return set()

    return renew


def ends_after_a_while(real: Any) -> Any:
    def publish(self: ZmqPublisher, events: Any) -> None:
        if asyncio.get_running_loop().time() < _ILL_AT_S:
            real(self, events)

    return publish


def unclear(_real: Any) -> Any:
    return lambda self: b"went wrong"


def same_salt(_real: Any) -> Any:
    return lambda self, tenant, rules, own: "salt"


MUTATIONS: dict[str, tuple[str, str, Plan, Patch]] = {
    "tokens that never come": ("ends", "", small(), around(Stepper, "_deliver", silenced)),
    "requests that have no end": ("ends", "no end", small(), around(RequestCycle, "run", endless)),
    "an engine that fails": ("ends", "without a fault", small(), around(EngineModel, "_prepared", failing)),
    "a body that is no error": (
        "ends",
        "unclear error",
        small("tenants", tenants={"ada": {"requests_per_minute": 1}, "eve": {}, "probe": {}}),
        around(ApiError, "body", unclear),
    ),
    "bytes after the end": (
        "ends",
        "after the end",
        small(),
        around(DownstreamConnection, "on_response_complete", after_the_end),
    ),
    "another model": ("text", "wrong text", small(), around(EngineModel, "__init__", other_text)),
    "an answer without its end": (
        "text",
        "a part of the text",
        small(),
        around(AnswerText, "take", cut_text),
    ),
    "loads that stay": ("left", "load of", small(), around(LoadAccount, "finish", nothing)),
    "a task that stays": (
        "left",
        "a task",
        small(),
        around(RequestTracker, "begin", begin_with(leave_a_task)),
    ),
    "a timer that stays": (
        "left",
        "a timer",
        small(),
        around(RequestTracker, "begin", begin_with(leave_a_timer)),
    ),
    "connections that stay": ("left", "a connection", small(), around(ProxyApp, "close", nothing)),
    "events that end": ("receipts", "in quiet", small(), around(ZmqPublisher, "publish", ends_after_a_while)),
    "one salt for all": (
        "tenants",
        "cached tokens",
        small("tenants", requests=24, config={"keys": {"isolate": "tenant"}}),
        around(Isolation, "salt", same_salt),
    ),
    "leases that stay": ("leases", "after its end", small("replicas"), around(Leases, "release", kept)),
    "leases that are not renewed": (
        "leases",
        "is followed by",
        small("replicas"),
        around(Leases, "renew", lost_unseen),
    ),
    "members that stay": ("leases", "replicas of", small("replicas"), around(Membership, "leave", quietly)),
    "a prompt that passes what it is to hit": (
        "order",
        "over",
        waiting(),
        around(EngineOrder, "work_behind", lambda _real: lambda self, work_s, rank_s: work_s),
    ),
    "one class for all": (
        "order",
        "class",
        small("order"),
        around(EngineOrder, "priority", lambda real: lambda self, work_s: real(self, work_s) % BAND_MS),
    ),
    "an engine that fails beside another's fault": (
        "ends",
        "418",
        small(faults=(Fault(at_s=0.0, kind="hang", target=0, lasts_s=15.0),)),
        failing_elsewhere,
    ),
    "two usage lines": ("work", "2 usage lines", small(), around(RequestTracker, "end", repeated(2))),
    "requests counted twice": (
        "work",
        "metrics count",
        small(),
        around(RequestTracker, "_settle", repeated(2)),
    ),
    "a request computed twice": (
        "work",
        "computed 2 times",
        small(),
        around(EngineModel, "sim_requests", twins),
    ),
    "charges that are not settled": (
        "work",
        "is charged",
        small("tenants"),
        around(Tenant, "charge", repeated(2)),
    ),
    "two charges to a share": (
        "work",
        "is charged 2 times",
        small("tenants"),
        around(AdmissionQueue, "charge", charged_twice),
    ),
    "a turn of many calls": (
        "turns",
        "calls in one turn",
        small(),
        around(RequestTracker, "begin", begin_with(many_calls)),
    ),
    "an exception": (
        "faults",
        "unhandled",
        small(),
        around(RequestTracker, "begin", begin_with(raise_later)),
    ),
    "an engine that does not come back": (
        "faults",
        "not ready",
        small(),
        around(EngineApp, "_models", ill_after_a_while),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(_SEEDS))
def test_nothing_is_objected_to_without_a_defect(kind: str) -> None:
    assert play(small(kind), counts_calls=True).violations == []


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS)
def test_an_oracle_sees_its_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, text, plan, mutate = MUTATIONS[name]
    mutate(monkeypatch)
    report = play(plan, counts_calls=oracle == "turns")
    assert seen(report, oracle, text), [str(one) for one in report.violations]
