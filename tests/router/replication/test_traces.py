"""Recorded truth read through the server: every hit exact, from rows, layout and scheme as another replica
gets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from router.index.learn.hash_scheme import Detection
from router.index.model import FleetResidency
from router.index.query_plan import EngineQuery, query_hits
from router.replication.registry import EngineFacts
from router.replication.settings import SharedSettings
from router.tools.trace_verification import (
    RECORDED,
    ProbePrompt,
    apply_line,
    learn_trace,
    read_trace,
    trace_facts,
)
from tests.router.replication.backend import SharedIndex, make_settings
from tests.support.examples import some
from tests.support.paths import TRACES
from tests.support.redis_servers import Cluster, Server


def replay(path: Path, shared: SharedIndex) -> tuple[int, int]:
    """(Probes, those exact), predicted from what the reader gets alone; in learned mode, which other replicas
    cannot predict, from the reader's rows and the writer's translation."""
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
    engine = fleet.engine(RECORDED)
    if engine.detection is not Detection.NATIVE or engine.scheme is None:
        return fleet.predict(prompt, [RECORDED])[RECORDED].hit_tokens
    shared.mirror.describe(RECORDED, EngineFacts(engine.layout, engine.scheme, "native"))
    found = shared.look(prompt.hashes(engine.scheme))
    told = found.engines.get(RECORDED)
    if told is None:
        return 0
    assert told.scheme == engine.scheme
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
