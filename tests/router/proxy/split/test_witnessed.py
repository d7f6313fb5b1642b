"""An answer that came belongs to somebody at every moment: also while the prefill engine is asked whether its
lease held, when the client leaves."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.members import at_once
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.pd.handoff import DisaggState, Handoff
from kvatlas.router.pd.settings import PdSettings, PdStats
from kvatlas.router.pd.transfer import connector_of
from kvatlas.router.proxy.carriers import Outbound
from kvatlas.router.proxy.disaggregated import DisaggForwarder
from kvatlas.router.proxy.headers import read_request_headers
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from tests.support.proxy_rig import CHAT as BODY
from tests.support.proxy_rig import FakePlacement
from tests.support.waiting import until

NO_FIELDS = ClientHead("POST", CHAT, CHAT.encode(), b"", [], {})
PAGE = b'vllm:num_requests_running{engine="0"} 0.0\nvllm:nixl_num_kv_expired_reqs_total{engine="0"} 0.0\n'


class Connections:
    """A carrier whose answers are the test's."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.released: list[Any] = []
        self.asked = asyncio.Event()

    async def ask(self, attempt: Any, out: Any, timeout_s: float, once: Any = None, body: Any = None) -> Any:
        once()
        self.asked.set()
        return await self.answer

    def done(self, answer: Any) -> None:
        self.released.append(answer)


class Pages:
    """The prefill engine's metrics: this many pages, then no answer."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.calls = 0
        self.hangs = asyncio.Event()

    async def __call__(self, base_url: str) -> bytes:
        self.calls += 1
        if self.calls > self.pages:
            self.hangs.set()
            await asyncio.Event().wait()
        return PAGE


def fetch(connections: Connections, metrics: Pages, now: list[float]) -> asyncio.Task[Any]:
    """Ask the decode engine with a lease of 5 s whose margin begins at once."""
    settings = PdSettings()
    legs = DisaggForwarder(
        cast("Any", connections),
        connector_of(settings, metrics),
        pd=settings,
        proxy=ProxySettings(),
        stats=PdStats(),
        proxy_stats=ProxyStats(),
        clock=lambda: now[0],
        metrics=metrics,
    )
    request = InboundRequest("POST", CHAT, b"", [], BODY)
    record = RequestTracker(lambda: now[0]).begin("POST", CHAT)
    out = Outbound(cast("Any", None), request, read_request_headers(NO_FIELDS, b""), b"/", record)
    disagg = DisaggState(settings)
    # Its margin has begun: the number of ended leases is looked up immediately.
    disagg.handed_over(Handoff(b"{}", "p", None, now[0], now[0] + 0.001, now[0] + 5.0, "http://p"))
    attempt = FakePlacement("http://d", request=request)
    return asyncio.ensure_future(legs.fetch(attempt, at_once(split_body(CHAT, BODY)), out, disagg, 1.0))


@pytest.mark.parametrize("pages", [0, 1])
async def test_a_client_that_leaves_while_the_lease_is_looked_up_leaves_no_connection(pages: int) -> None:
    now = [100.0]
    connections, metrics = Connections(), Pages(pages)
    task = fetch(connections, metrics, now)
    await connections.asked.wait()
    if pages:
        await until(lambda: metrics.calls == 1, "the number before the end is known")
        now[0] += 10.0
        connections.answer.set_result("the answer")
        await metrics.hangs.wait()
    else:
        await metrics.hangs.wait()
        connections.answer.set_result("the answer")
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connections.released == ["the answer"]
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1  # the search has ended


async def test_a_client_that_leaves_before_the_answer_ends_the_look_up_too() -> None:
    connections, metrics = Connections(), Pages(0)
    task = fetch(connections, metrics, [100.0])
    await metrics.hangs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert connections.released == []
    assert len(asyncio.all_tasks()) == 1
