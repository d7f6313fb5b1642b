"""Through a real Envoy: the picker chooses a pair, a sidecar beside the decode engine asks both."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.pd.settings import PdSettings, SidecarSettings
from kvatlas.router.placement.candidate import PolicySettings, PullSettings
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.app.test_prefill_decode import busy
from tests.router.services.epp.test_envoy import FORMS, epp, port_of
from tests.support.envoy import Envoy, envoy, program
from tests.support.front import fronting
from tests.support.ports import free_port
from tests.support.sidecars import SidecarRig, completion, endpoint, sidecar
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
    pd: PdSettings = SPLITS,
    decode: dict[str, Any] = D,
    suspect_s: float = 300.0,
) -> AsyncIterator[tuple[Rig, Envoy, SidecarRig, list[SimulatedEngine]]]:
    """Prefill engines, a decode engine behind its sidecar, picker and gateway."""
    proxy = ProxySettings(suspect_s=suspect_s)
    async with running(*prefills, decode) as (*ps, d), sidecar(d, *ps, pd=pd, proxy=proxy) as beside:
        behind = EngineAddress(beside.url, role="decode")
        helpers = [EngineAddress(p.base_url, role="prefill") for p in ps]
        config = configure(*helpers, behind, epp=epp(sidecar=True), pd=pd)
        async with routing(config) as rig:
            names = [*map(endpoint, ps), beside.endpoint]
            async with envoy(folder, names, [port_of(rig)]) as through:
                yield rig, through, beside, [*ps, d]
                await until(lambda: rig.idle, "every request has ended")
                rig.check_books()


def legs(rig: Rig) -> list[tuple[str, str, str]]:
    return [(one.leg, one.engine_id, one.outcome) for one in rig.router.accounts.receipts.latest]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_both_engines_serve_and_the_receipts_are_theirs(
    tmp_path: Path, form: str, stream: bool
) -> None:
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
        assert beside.sidecar.pd_stats.handoffs == 2
        assert rig.router.proxy.pd_stats.split == 2
        prefills = [one for one in rig.router.accounts.receipts.latest if one.leg == "prefill"]
        assert [one.outcome for one in prefills] == ["exact", "exact"]
        assert [(one.actual_tokens or 0) > 600 for one in prefills] == [False, True]
        assert [one.ttft_s is not None for one in prefills] == [stream, stream]


async def test_both_engines_behind_a_sidecar_get_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.fleet.poller.read_obeys_hints", lambda *_: True)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    shared, policy = str(secret), PolicySettings(retention_hints=True)

    async with (
        running(P, D) as engines,
        fronting(engines[0]) as p,
        fronting(engines[1]) as d,
        sidecar(d, p, pd=SPLITS, secret_file=shared) as beside,
    ):
        listed = EngineAddress(p.base_url, role="prefill"), EngineAddress(beside.url, role="decode")
        own = SidecarSettings(secret_file=shared)
        config = configure(*listed, epp=epp(sidecar=True), pd=SPLITS, policy=policy, sidecar=own)
        names = [endpoint(p), beside.endpoint]
        async with routing(config) as rig, envoy(tmp_path, names, [port_of(rig)]) as through:
            await until(lambda: all(one.obeys_hints for one in rig.router.fleet), "metrics read")
            for number, form in enumerate(FORMS):
                claim = {"x-session-id": f"s{number}", "x-kvatlas-retention-hint": "op {}"}
                with busy(rig):
                    body = completion(number)
                    status, _, answer = await through.ask(form, PATH, body, headers=claim)
                assert status == 200, answer
                for front in (p, d):
                    # A background check of renderings may come after the request.
                    asked = [sent for path, sent in front.bodies if path == PATH]
                    params = json.loads(asked[-1])["kv_transfer_params"]
                    assert (len(params) > 1, params["retention_hint"]["value"]) == (True, 0.5)
            assert beside.sidecar.pd_stats.handoffs == len(FORMS)
            assert rig.router.accounts.retention.stats.sent["session"] == 2 * len(FORMS)
            await until(lambda: rig.idle, "every request has ended")


async def test_a_client_steers_nobody(tmp_path: Path) -> None:
    """Its own field names an engine that it may ask; the picker wants one engine alone."""

    async with apart(tmp_path, P) as (_, through, beside, (p, _)):
        for form in FORMS:
            own = {"x-prefiller-host-port": endpoint(p)}
            body = completion(1, 100, n=2, temperature=1.0)
            status, _, _ = await through.ask(form, PATH, body, headers=own)
            assert status == 200
        assert beside.sidecar.pd_stats.aggregated == {"local": len(FORMS)}
        assert beside.sidecar.pd_stats.split == 0


async def test_a_prefill_engine_that_dies_costs_no_answer(tmp_path: Path) -> None:
    async with apart(tmp_path, {**P, "dies_at": "before_answer"}, suspect_s=0.0) as (rig, through, beside, _):
        with busy(rig):
            status, _, answer = await through.ask("original_dst", PATH, completion(1))
        assert status == 200, answer
        await until(lambda: rig.idle, "the receipts are written")
        assert [leg for leg, _, _ in legs(rig)] == ["decode"]
        assert beside.sidecar.pd_stats.handoffs == 0


async def test_the_second_choice_computes_where_the_first_one_is_gone(tmp_path: Path) -> None:
    async with apart(tmp_path, {**P, "dies_at": "before_answer"}, P, suspect_s=0.0) as (
        rig,
        through,
        beside,
        _,
    ):
        for number in range(4):  # one of them meets it
            with busy(rig):
                status, _, answer = await through.ask("override_host", PATH, completion(number))
            assert status == 200, answer
        assert beside.sidecar.pd_stats.handoffs == 4


async def test_an_engine_behind_its_sidecar_pulls_from_another(tmp_path: Path) -> None:
    port = free_port()
    tier: dict[str, Any] = {"kv_connector": "offloading", "host_blocks": 4000}
    pd = PdSettings(offloading_port=port)

    async with (
        running({**tier, "side_channel_port": port}, tier) as (source, target),
        sidecar(target, source, pd=pd) as beside,
    ):
        config = configure(
            EngineAddress(source.base_url),
            EngineAddress(beside.url, kv_source="127.0.0.1:9"),
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
            await until(lambda: feeds[beside.url].last_seq == last, "every batch applied")
            names = [endpoint(source), beside.endpoint]
            async with envoy(tmp_path, names, [port_of(rig)]) as through:
                load = next(one for one in rig.router.fleet if one.engine_id == source.base_url).load
                ticket = load.admit(uncached_tokens=80_000, now=time.monotonic(), streams=True)
                status, _, answer = await through.ask(FORMS[0], PATH, completion(1))
                load.finish(ticket, time.monotonic())
                assert status == 200, answer
                await until(lambda: rig.idle, "the receipt is written")
        assert rig.router.planner.pulls.stats.pulls == {"complete": 1}
        receipt = rig.router.accounts.receipts.latest[-1]
        assert (receipt.engine_id, receipt.pulled_from) == (beside.url, source.base_url)
        assert receipt.actual_tokens == receipt.predicted_tokens == 688
