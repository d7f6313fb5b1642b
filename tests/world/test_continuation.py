"""Where an engine breaks, streams go on from another one where that is asked for, and end with an error
event where it is not."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.support.examples import some
from tests.world.plan import ClientRequest, Fault, Plan
from tests.world.world import play

BREAKS = ("core", "die", "stop", "api_server", "power", "hang", "http")


def plan(kind: str, *, continues: bool, streams: int = 8, **fields: Any) -> Plan:
    """Two engines with long streams, and a break of the first one in their midst."""
    engine = {
        "characters": "mixed",
        "stream_interval": 5 if kind in {"core", "http"} else 1,
        "decode_s_per_token": 0.02,
        "num_blocks": 512 * streams,
        "max_num_seqs": 256,
    }
    requests = tuple(
        ClientRequest(
            at_s=0.8 * number / streams,
            client=number,
            api="completions" if number % 2 else "chat",
            story=number,
            stream=True,
            answer_tokens=200,
            body={"ignore_eos": True},
            **fields,
        )
        for number in range(streams)
    )
    fault = Fault(at_s=2.0, kind=kind, target=0, lasts_s=14.0)
    return Plan(
        seed=5,
        kind="continuation",
        engines=(engine, engine),
        requests=requests,
        faults=(fault,),
        config={"proxy": {"continue_streams": continues, "idle_timeout_s": 5.0}},
    )


@pytest.mark.parametrize("kind", some(BREAKS, len(BREAKS)))
def test_streams_of_a_broken_engine_go_on(kind: str) -> None:
    report = play(plan(kind, continues=True))
    assert report.violations == []
    assert report.continued >= 3
    assert "error event" not in report.counts


@pytest.mark.long
@pytest.mark.parametrize("kind", ["core", "hang"])
def test_all_streams_of_a_busy_engine_that_breaks_go_on(kind: str) -> None:
    """Of 200 streams 79 to 94 are on the engine that breaks; none reads otherwise than without the break."""
    report = play(plan(kind, continues=True, streams=200))
    assert report.violations == []
    assert report.continued >= 70
    assert "error event" not in report.counts


@pytest.mark.long
@pytest.mark.parametrize(("kind", "continues"), [(BREAKS[0], False), *((kind, True) for kind in BREAKS)])
def test_without_the_setting_or_where_a_client_does_not_want_it_they_end(kind: str, continues: bool) -> None:
    fields = {"x-kvatlas-continue": "off"} if continues else {}
    report = play(plan(kind, continues=continues, fields=fields))
    assert report.violations == []
    assert report.continued == 0
    assert report.counts["error event"] >= 3


def rollout(seed: int) -> Plan:
    """Engines that are replaced one after another under streams that last longer than each has."""
    rng = random.Random(seed)
    engine = {
        "characters": "mixed",
        "stream_interval": rng.choice((1, 1, 5)),
        "decode_s_per_token": rng.choice((0.02, 0.05)),
        "prefill_s_per_token": rng.choice((1e-5, 1e-3)),
        "num_blocks": 4096,
    }
    bodies: tuple[dict[str, Any], ...] = ({}, {"min_tokens": 20}, {"stop": ["er", " story", "漢"]})
    requests = tuple(
        ClientRequest(
            at_s=round(rng.random() * 6, 3),
            client=number,
            api=rng.choice(("chat", "completions", "tokens")),
            story=number % 5,
            length=rng.choice((3, 40)),
            stream=rng.random() < 0.9,
            answer_tokens=rng.choice((20, 300, 600)),
            body={"ignore_eos": True, **rng.choice(bodies)},
        )
        for number in range(rng.choice((10, 24)))
    )
    return Plan(
        seed=seed,
        kind="continuation",
        engines=(engine,) * rng.choice((2, 3, 4)),
        requests=requests,
        faults=(Fault(at_s=2.0, kind="rollout", target=0, lasts_s=rng.choice((1.0, 4.0, 8.0))),),
        config={"proxy": {"continue_streams": True}},
    )


@pytest.mark.parametrize("seed", some((20, 3, 17, 4, 5, 6), 6))
def test_a_rollout_of_all_engines_loses_no_stream(seed: int) -> None:
    report = play(rollout(seed))
    assert report.violations == []
    assert report.continued
    assert set(report.counts) == {"200"}


def rollout_apart(seed: int) -> Plan:
    """The same, where prompts are computed on other engines than answers."""
    plan, rng = rollout(seed), random.Random(seed)
    connector = rng.choice(("nixl", "mooncake", "offloading"))
    engine = {**plan.engines[0], "kv_connector": connector, "kv_lease_s": 12.0, "prefill_s_per_token": 1e-3}
    roles = ("decode", "decode", "decode", "prefill", "prefill")
    pd = {
        "connector": "offloading" if connector == "offloading" else "auto",
        "lease_s": 12.0,
        "min_remote_tokens": 64,
        "leg_overhead_s": 0.0,
        "transfer_s_per_token": 0.0,
    }
    return msgspec.structs.replace(
        plan,
        engines=tuple({**engine, "role": role} for role in roles),
        config={**plan.config, "pd": pd},
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", [5, 30, 33, 36])
def test_a_rollout_of_engines_with_roles_loses_no_stream(seed: int) -> None:
    report = play(rollout_apart(seed))
    assert report.violations == []
    assert report.continued
    assert set(report.counts) == {"200"}
