"""Through a real Envoy: the picker chooses a pair, and a sidecar like llm-d's, beside the decode engine, asks
both."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import PolicySettings, PullSettings
from tests.router.app.test_prefill_decode import busy
from tests.router.services.epp.test_envoy import FORMS, epp, port_of
from tests.support.envoy import Envoy, envoy, program
from tests.support.front import fronting
from tests.support.ports import free_port
from tests.support.sidecars import Sidecar, completion, endpoint, sidecar
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing, running

pytestmark = pytest.mark.envoy
P: dict[str, Any] = {"role": "prefill"}
D: dict[str, Any] = {"role": "decode"}
SPLITS = PdSettings(min_remote_tokens=64, leg_overhead_s=0.0, transfer_s_per_token=0.0)
PATH = "/v1/completions"


@pytest.fixture(autouse=True)
def _needs_envoy() -> None:
    program()


@asynccontextmanager
async def apart(
    folder: Path,
    *prefills: dict[str, Any],
    **changes: Any,
) -> AsyncIterator[tuple[Rig, Envoy, Sidecar, list[SimulatedEngine]]]:
    """Prefill engines, a decode engine behind its sidecar, picker and gateway."""
    async with running(*prefills, D) as (*ps, d), sidecar(d, *ps) as beside:
        behind = EngineAddress(beside.base_url, role="decode")
        helpers = [EngineAddress(p.base_url, role="prefill") for p in ps]
        config = configure(*helpers, behind, epp=epp(sidecar=True), pd=SPLITS, **changes)
        async with routing(config) as rig:
            names = [*map(endpoint, ps), endpoint(beside)]
            async with envoy(folder, names, [port_of(rig)]) as through:
                yield rig, through, beside, [*ps, d]
                await until(lambda: rig.idle, "every request has ended")
                rig.check_books()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_both_engines_serve_and_have_receipts(tmp_path: Path, form: str, stream: bool) -> None:
    async with apart(tmp_path, P) as (rig, through, beside, (p, _)):
        asked = completion(1, stream=stream)
        if stream:
            asked["stream_options"] = {"include_usage": True}
        longer = {**asked, "prompt": asked["prompt"] + completion(2, 500)["prompt"]}
        for body in (asked, longer):
            with busy(rig):
                status, headers, answer = await through.ask(form, PATH, body)
            assert status == 200, answer
            assert headers["x-kvatlas-prefill-engine"] == p.base_url
            await until(lambda: rig.idle, "the receipts are written")
            await rig.caught_up(p)
        assert beside.splits == 2
        assert rig.router.proxy.pd_stats.split == 2
        latest = rig.router.accounts.receipts.latest
        # The answer does not tell the prefill's hit.
        told = [(one.engine_id, one.outcome) for one in latest if one.leg == "prefill"]
        assert told == [(p.base_url, "unreported")] * 2
        assert [one.engine_id for one in latest if one.leg == "decode"] == [beside.base_url] * 2


async def test_hints_reach_the_engine_of_requests_that_are_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar passes their bodies on unchanged, and replaces the transfer parameters of the others."""
    monkeypatch.setattr("kvatlas.router.fleet.poller.read_obeys_hints", lambda *_: True)
    policy = PolicySettings(retention_hints=True)
    async with apart(tmp_path, P, policy=policy) as (rig, through, beside, _):
        await until(lambda: all(one.obeys_hints for one in rig.router.fleet), "metrics read")
        claim = {"kv_transfer_params": {"do_remote_prefill": True}}
        for tokens in (700, 40):
            with busy(rig):
                body = completion(tokens, tokens, **claim)
                status, _, answer = await through.ask(FORMS[0], PATH, body, headers={"x-session-id": "s"})
            assert status == 200, answer
        split, alone = (sent["kv_transfer_params"] for sent in beside.bodies)
        assert (beside.splits, "retention_hint" in split) == (1, False)
        assert alone.keys() == {"retention_hint"}
        assert rig.router.accounts.retention.stats.sent["session"] == 1


async def test_a_client_cannot_choose_engines(tmp_path: Path) -> None:
    """Its own field names an engine that the sidecar may ask; the picker wants one engine alone."""

    async with apart(tmp_path, P) as (_, through, beside, (p, _)):
        for form in FORMS:
            own = {"x-prefiller-host-port": endpoint(p)}
            body = completion(1, 100, n=2, temperature=1.0)
            status, _, _ = await through.ask(form, PATH, body, headers=own)
            assert status == 200
        assert (beside.splits, len(beside.bodies)) == (0, len(FORMS))


async def test_an_error_of_the_prefill_engine_is_the_clients_answer(tmp_path: Path) -> None:
    """Which of the engines it counts against: ``test_exchange.py``."""
    async with running(P, D) as engines, fronting(engines[0]) as p, sidecar(engines[1], p) as beside:
        p.overrides[PATH] = lambda: (500, {"error": {"message": "no", "code": 500}})
        listed = EngineAddress(p.base_url, role="prefill"), EngineAddress(beside.base_url, role="decode")
        config = configure(*listed, epp=epp(sidecar=True), pd=SPLITS)
        names = [endpoint(p), endpoint(beside)]
        async with routing(config) as rig, envoy(tmp_path, names, [port_of(rig)]) as through:
            with busy(rig):
                status, _, _ = await through.ask(FORMS[0], PATH, completion(1))
            assert (status, beside.splits, beside.bodies) == (500, 0, [])
            await until(lambda: rig.idle, "every request has ended")
            rig.check_books()


async def test_an_engine_behind_its_sidecar_pulls_from_another(tmp_path: Path) -> None:
    port = free_port()
    tier: dict[str, Any] = {"kv_connector": "offloading", "host_blocks": 4000}
    pd = PdSettings(offloading_port=port)

    async with (
        running({**tier, "side_channel_port": port}, tier) as (source, target),
        sidecar(target, source, p2p_port=port) as beside,
    ):
        config = configure(
            EngineAddress(source.base_url),
            EngineAddress(beside.base_url, kv_source="127.0.0.1:9"),
            epp=epp(sidecar=True),
            pd=pd,
            pull=PullSettings(enabled=True),
            policy=PolicySettings(spread=0.0, probe_interval_s=3600.0),
        )
        async with routing(config) as rig:
            await until(lambda: all(one.version for one in rig.router.fleet), "versions are known")
            for url, number in ((source.base_url, 1), (target.base_url, 2)):
                async with rig.session.post(url + PATH, json=completion(number)) as direct:
                    assert direct.status == 200
            await rig.caught_up(source)
            theirs = {one.base_url: one for one in (source, target)}
            feeds = rig.router.lifecycle.feeds.stats
            last = theirs[target.base_url].publisher.next_seq - 1  # type: ignore[union-attr]
            await until(lambda: feeds[beside.base_url].last_seq == last, "every batch applied")
            names = [endpoint(source), endpoint(beside)]
            async with envoy(tmp_path, names, [port_of(rig)]) as through:
                load = next(one for one in rig.router.fleet if one.engine_id == source.base_url).load
                ticket = load.admit(uncached_tokens=80_000, now=time.monotonic(), streams=True)
                status, _, answer = await through.ask(FORMS[0], PATH, completion(1))
                load.finish(ticket, time.monotonic())
                assert status == 200, answer
                await until(lambda: rig.idle, "the receipt is written")
        assert rig.router.planner.pulls.stats.pulls == {"complete": 1}
        receipt = rig.router.accounts.receipts.latest[-1]
        assert (receipt.engine_id, receipt.pulled_from) == (beside.base_url, source.base_url)
        assert receipt.actual_tokens == receipt.predicted_tokens == 688
