"""The contract of every index, and recorded truth, over Redis and Valkey, one server and a Cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.base import Index
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineHit, EngineQuery, query_hits
from kvatlas.router.replication import write_queue
from kvatlas.router.replication.descriptions import engine_facts
from kvatlas.router.replication.settings import SharedSettings
from kvatlas.router.tools.trace_file import read_trace, trace_facts
from kvatlas.router.tools.trace_verification import RECORDED, ProbePrompt, apply_line, learn_trace
from tests.router.replication.backend import SharedIndex, make_settings
from tests.support.examples import examples, some
from tests.support.index_contract import IndexContract, IndexMachine
from tests.support.paths import TRACES
from tests.support.redis_servers import Cluster, Server, any_program

pytestmark = pytest.mark.real  # a Redis or Valkey server

Open = Callable[[SharedSettings], SharedIndex]


class TestSharedContract(IndexContract):
    @pytest.fixture
    def make(self, servers: Server | Cluster, open_index: Open) -> Callable[[], Index]:
        return lambda: open_index(make_settings(servers.url))


class TestWideCodesAndPartitions(IndexContract):
    @pytest.fixture
    def make(self, plain_server: Server, open_index: Open) -> Callable[[], Index]:
        return lambda: open_index(make_settings(plain_server.url, code_bytes=2, partitions=4))


class _OnServer(IndexMachine):
    """A machine on a server that lives as long as the module."""

    url = ""
    changes: dict[str, int] = {}  # noqa: RUF012  # hypothesis makes the classes its own way
    constants: dict[str, int] = {}  # noqa: RUF012

    def new_index(self) -> Index:
        self.patched = pytest.MonkeyPatch()
        for name, value in self.constants.items():
            self.patched.setattr(write_queue, name, value)
        self.shared = SharedIndex(make_settings(self.url, **self.changes))
        return self.shared

    def teardown(self) -> None:
        self.shared.close()
        self.patched.undo()


class NarrowMachine(_OnServer):
    """One byte of code, scripts of three blocks."""

    constants = {"SCRIPT_BLOCKS": 3}  # noqa: RUF012


class WideMachine(_OnServer):
    """Two bytes of code, four partitions."""

    changes = {"code_bytes": 2, "partitions": 4}  # noqa: RUF012


class OverflowingMachine(_OnServer):
    """No more than two changed blocks may wait: engines are mirrored again all the time."""

    constants = {"TOUCHED_MAX": 2}  # noqa: RUF012


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    server = Server(any_program())
    _OnServer.url = server.url
    yield
    server.close()


_QUICK = settings(max_examples=examples(12), stateful_step_count=20)
TestNarrowMachine = NarrowMachine.TestCase
TestNarrowMachine.settings = _QUICK
TestWideMachine = WideMachine.TestCase
TestWideMachine.settings = _QUICK
TestOverflowingMachine = OverflowingMachine.TestCase
TestOverflowingMachine.settings = _QUICK


def replay(path: Path, shared: SharedIndex) -> tuple[int, int]:
    """(Probes, those exact), predicted from what the reader gets alone."""
    fleet = FleetResidency(trace_facts(path), shared)
    learn_trace(fleet, path)
    probes = exact = 0
    for number, line in read_trace(path):
        if line.events is not None:
            apply_line(fleet, path, number, line)
        elif line.probe is not None and line.hit_tokens is not None:
            probes += 1
            exact += predict(fleet, shared, ProbePrompt.from_probe(line.probe)) == line.hit_tokens
    return probes, exact


def predict(fleet: FleetResidency, shared: SharedIndex, prompt: ProbePrompt) -> int:
    engine, query = fleet.engine(RECORDED), fleet.residency(RECORDED).query()
    if isinstance(query, EngineHit):
        return query.hit_tokens
    if query.learned is None and engine.detection is not Detection.NATIVE:
        return fleet.predict(prompt, [RECORDED])[RECORDED].hit_tokens
    shared.mirror.describe(RECORDED, engine_facts(engine, query, FeedState.READY, 0), query.learned)
    found = shared.look(prompt.hashes(query.scheme))
    told = found.engines.get(RECORDED)
    if told is None:
        return 0
    assert told.scheme == query.scheme
    assert told.layout == engine.layout
    assert told.layout is not None
    seat = EngineQuery(RECORDED, told.scheme, told.layout, told.slot)
    return query_hits(found.rows, prompt.num_tokens, [seat], detail=False)[RECORDED].hit_tokens


@pytest.mark.parametrize("path", some(TRACES, 4), ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_exact_through_one_server(
    path: Path, plain_server: Server, open_index: Callable[[SharedSettings], SharedIndex]
) -> None:
    probes, exact = replay(path, open_index(make_settings(plain_server.url)))
    assert probes > 0
    assert exact == probes


@pytest.mark.parametrize("path", some(TRACES[::6], 3), ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_exact_through_a_cluster(
    path: Path, cluster: Cluster, open_index: Callable[[SharedSettings], SharedIndex]
) -> None:
    probes, exact = replay(path, open_index(make_settings(cluster.url)))
    assert probes > 0
    assert exact == probes
