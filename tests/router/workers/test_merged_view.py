"""The pages of several workers, and the sockets that the parent opens for them."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client.core import CounterMetricFamily

from kvatlas.router.api.answers import PrefixView
from kvatlas.router.api.views import LATEST_SHOWN, SESSIONS_SHOWN, LocalView
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.receipts import EVIDENCE_KEPT
from kvatlas.router.openai.request import Session, Usage
from kvatlas.router.workers.context import PortTakenError, WorkerSockets, cores
from kvatlas.router.workers.gossip import WorkerGossipStats
from kvatlas.router.workers.merged_metrics import encoded_family, encoded_page
from kvatlas.router.workers.merged_view import AggregateView, _add, _joined, group_families, worker_families
from kvatlas.router.workers.sibling_calls import SiblingCalls


class LateSibling:
    """Counts one request more each time it is asked; each answer comes when ``release`` has a turn for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.release = asyncio.Semaphore(0)

    async def call_all(self, path: str) -> dict[int, bytes]:
        assert path == "/worker/metrics"
        self.asked += 1
        counter = CounterMetricFamily("kvatlas_tests", "text", value=self.asked)
        answer = encoded_page(1, 0, [encoded_family(counter)])
        await self.release.acquire()
        return {1: answer}


async def test_counts_never_fall_however_scrapes_overlap_and_end() -> None:
    sockets = WorkerSockets(2, ("127.0.0.1", 0))
    router, sibling = Router(Config()), LateSibling()
    try:
        worker = sockets.open_worker(0, 0, lambda: None, -1)
        view = AggregateView(worker, router.sources, cast("SiblingCalls", cast("Any", sibling)))
        first, second, gone = (asyncio.create_task(view.metrics()) for _ in range(3))
        while not sibling.asked:
            await asyncio.sleep(0)
        sibling.release.release()
        assert b"kvatlas_tests_total 1.0" in await first
        gone.cancel()
        sibling.release.release()
        assert b"kvatlas_tests_total 2.0" in await second
        sibling.release.release()
        assert b"kvatlas_tests_total 3.0" in await view.metrics()
    finally:
        router.proxy.close()
        router.reader.close()
        sockets.close()


class Sibling:
    """Answers for another worker's pages; notes the paths that it is asked for."""

    def __init__(self, **pages: Any) -> None:
        self.pages = pages
        self.asked: list[str] = []

    async def call_all(self, path: str) -> dict[int, bytes]:
        self.asked.append(path)
        name = path.removeprefix("/worker/").partition("?")[0]
        return {1: msgspec.json.encode(self.pages[name])}


async def test_answers_and_history_of_all_workers() -> None:
    sockets = WorkerSockets(2, ("127.0.0.1", 0))
    router = Router(Config())
    try:
        for request_id in ("one & only", "another"):
            record = router.proxy.requests.begin("POST", "/v1/completions")
            record.request_id, record.status = request_id, 200
            router.proxy.requests.end(record)
        worker = sockets.open_worker(0, 0, lambda: None, -1)
        own = LocalView(router.sources)
        theirs, history = await own.answers(), await own.history()
        later = [msgspec.structs.replace(one, at_s=one.at_s + 60, request_id="theirs") for one in theirs]
        sibling = Sibling(answers=later * LATEST_SHOWN, receipts=[], history=history)
        view = AggregateView(worker, router.sources, cast("SiblingCalls", cast("Any", sibling)))
        shown = await view.answers()
        assert len(shown) == LATEST_SHOWN
        assert {one.request_id for one in shown} == {"theirs"}, "the latest of all"
        found = await view.answers("one & only")
        assert found[0].request_id == "one & only"
        assert sibling.asked[-1] == "/worker/answers?wanted=one+%26+only"
        earlier = msgspec.structs.replace(theirs[0], at_s=theirs[0].at_s - 60, request_id="earlier")
        sibling.pages["answers"] = [earlier]
        assert [one.request_id for one in await view.answers()] == ["earlier", "one & only", "another"]
        assert await view.receipts("one & only") == []
        sibling.pages["engines"] = [{"engine": "http://e:1"}]
        assert await view.engines() == [], "one that has left here is not shown"
        assert (await view.history()).intervals[-1].requests == 4
    finally:
        router.proxy.close()
        router.reader.close()
        sockets.close()


async def test_prefixes_and_requests_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets, router = WorkerSockets(2, ("127.0.0.1", 0)), Router(Config())
    short = PrefixView("a", "", "m", 64, 1.0, {"e": [0], "f": [0]})
    long, other = PrefixView("b", "a", "m", 640, 2.0, {}), PrefixView("c", "", "m", 16, 3.0, {})
    with closing(sockets), closing(router.proxy), closing(router.reader):
        router.proxy.requests.begin("POST", "/v1/completions")
        (young,) = await LocalView(router.sources).requests()
        old = msgspec.structs.replace(young, age_s=young.age_s + 60)
        theirs = [msgspec.structs.replace(short, rate=4.0, holders={"f": [0, 1]}), other]
        sibling = Sibling(prefixes=theirs, requests=[old])
        worker = sockets.open_worker(0, 0, lambda: None, -1)
        view = AggregateView(worker, router.sources, cast("SiblingCalls", cast("Any", sibling)))

        async def mine(_: object) -> list[PrefixView]:
            return [long, short]

        monkeypatch.setattr(LocalView, "prefixes", mine)
        both = msgspec.structs.replace(short, rate=5.0, holders={"e": [0], "f": [0, 1]})
        assert await view.prefixes() == [other, both, long]
        assert [one.age_s > 50 for one in await view.requests()] == [True, False]


def test_an_engine_that_another_worker_follows_is_shown_with_its_feed() -> None:
    """With a shared index each engine has one follower."""
    few = {"accurate": 1, "compared": 2, "median_s": 0.5, "margin_s": 0.25, "guessed": True}
    mine = {
        "feed": None,
        "hits": "none",
        "load": 1,
        "receipts": {"exact": 1},
        "drifting": False,
        "contradicting": [1],
        "cache_worth_s_per_minute": 1.0,
        "first_tokens": few,
    }
    theirs = mine | {"feed": "ready", "hits": "all", "load": 2, "receipts": {"exact": 2, "under": 1}}
    theirs |= {"drifting": True, "contradicting": list(range(100))}
    shown = msgspec.json.decode(msgspec.json.encode(mine))
    _add(shown, theirs)
    assert (shown["feed"], shown["hits"], shown["load"]) == ("ready", "all", 1)
    assert (shown["receipts"], shown["drifting"]) == ({"exact": 3, "under": 1}, True)
    assert shown["contradicting"] == list(range(100))[-EVIDENCE_KEPT:]
    assert (shown["cache_worth_s_per_minute"], shown["first_tokens"]["compared"]) == (2.0, 4)
    own = mine | {"feed": "mine", "receipts": {}}
    _add(own, theirs)
    assert (own["feed"], own["hits"]) == ("mine", "none")


async def test_sessions_of_all_workers() -> None:
    sockets = WorkerSockets(2, ("127.0.0.1", 0))
    router = Router(Config())
    try:
        for tenant, name in (("ada", "shared"), ("ada", "own"), ("ada", "split")):
            record = router.proxy.requests.begin("POST", "/v1/completions")
            record.tenant, record.session, record.engine = tenant, Session(name), "e"
            record.usage = Usage(10, 1, 4)
            router.proxy.requests.end(record)
        worker = sockets.open_worker(0, 0, lambda: None, -1)
        mine = {one.session: one for one in await LocalView(router.sources).sessions()}
        turn = mine["split"].latest[0]
        later = msgspec.structs.replace(turn, at_s=turn.at_s + 60, engine="f")
        theirs = [
            msgspec.structs.replace(mine["split"], latest=[later], held_tokens={"e": 16, "f": 32}),
            msgspec.structs.replace(mine["shared"], tenant="eve"),
        ]
        sibling = Sibling(sessions=theirs)
        view = AggregateView(worker, router.sources, cast("SiblingCalls", cast("Any", sibling)))
        shown = await view.sessions("s")
        assert sibling.asked == ["/worker/sessions?wanted=s"]
        first = shown[0]
        assert (first.session, [one.engine for one in first.latest]) == ("split", ["e", "f"])
        assert (first.turns, first.prompt_tokens, first.cached_tokens) == (2, 20, 8)
        assert first.held_tokens == {"e": 16, "f": 32}
        rest = {(one.tenant, one.session): one.held_tokens for one in shown[1:]}
        assert rest == {("ada", "shared"): None, ("eve", "shared"): None}
        many = [msgspec.structs.replace(theirs[0], session=str(number)) for number in range(SESSIONS_SHOWN)]
        sibling.pages["sessions"] = many
        assert [one.session for one in await view.sessions()] == [one.session for one in many]
    finally:
        router.proxy.close()
        router.reader.close()
        sockets.close()


def test_workers_that_are_up_and_how_often_each_was_replaced() -> None:
    up, restarts = (
        [(one.labels["worker"], one.value) for one in family.samples]
        for family in group_families(2, {1}, {1: 3})
    )
    assert (up, restarts) == ([("0", 0.0), ("1", 1.0)], [("0", 0.0), ("1", 3.0)])
    requests = next(iter(worker_families(1, WorkerGossipStats(), Histogram((1.0,)), None)))
    assert [(one.labels["worker"], one.value) for one in requests.samples] == [("1", 0.0)]


def test_a_port_that_somebody_has_is_refused_also_if_it_may_be_shared() -> None:
    first = WorkerSockets(2, ("127.0.0.1", 0))
    try:
        port = first.public[0][0].getsockname()[1]
        assert [copy[0].getsockname()[1] for copy in first.public] == [port, port]
        with pytest.raises(PortTakenError, match=rf"server.port: cannot listen on 127.0.0.1:{port}"):
            WorkerSockets(2, ("127.0.0.1", port))
        with pytest.raises(PortTakenError, match=r"server.ops_port"):
            WorkerSockets(2, ("127.0.0.1", 0), ops=("127.0.0.1", port))
    finally:
        first.close()
    assert not first.folder.exists()


def test_a_worker_keeps_its_own_sockets_and_closes_all_others() -> None:
    sockets = WorkerSockets(3, ("127.0.0.1", 0), ops=("127.0.0.1", 0))
    try:
        public, control = [copy[0] for copy in sockets.public], sockets.folder / "1"
        worker = sockets.open_worker(1, 0, lambda: None, -1)
        assert [sock.fileno() >= 0 for sock in public] == [False, True, False]
        assert (worker.ops, sorted(worker.mesh)) == (None, [0, 2])
        assert worker.ops_at.endswith("of 127.0.0.1")
        assert worker.control.getsockname() == str(control) == worker.control_path(1)
        assert os.stat(sockets.folder).st_mode & 0o777 == 0o700
        own = {*worker.public, worker.control, *worker.mesh.values()}
        assert all(sock.fileno() >= 0 for sock in own)
        with (
            socket.create_connection(public[1].getsockname(), 5),
            socket.socket(socket.AF_UNIX) as sibling,
        ):
            sibling.connect(str(control))  # both listen from the start
    finally:
        sockets.close()


@pytest.mark.parametrize(
    ("text", "most"), [("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 10**6)]
)
def test_cores_are_no_more_than_the_containers_quota(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cores(tmp_path / "cpu.max") == min(most, cores(tmp_path / "missing"))


def test_workers_margins_of_first_tokens_are_joined_by_the_largest() -> None:
    """Each worker has compared others: the bound that holds for all of them is the larger one."""
    few = {"accurate": 1, "compared": 2, "median_s": 0.5, "margin_s": 0.25, "guessed": True}
    many = {"accurate": 3, "compared": 9, "median_s": 0.1, "margin_s": 0.05, "guessed": False}
    joined = {"accurate": 4, "compared": 11, "median_s": 0.1, "margin_s": 0.25, "guessed": False}
    for one, two in ((few, many), (many, few)):
        assert _joined(one, two) == joined
    assert _joined(few, many | {"margin_s": None})["margin_s"] == 0.25
    assert _joined(few | {"margin_s": None}, many | {"margin_s": None})["margin_s"] is None
