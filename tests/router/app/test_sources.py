"""A whole router whose engines come by themselves: readiness, holds, and who is forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import load
from kvatlas.router.fleet.settings import FileSettings, FleetSettings, KubernetesSettings
from tests.support.waiting import until
from tests.support.whole_router import OFTEN, configure, routing, running


def listed(path: Path, *engines: SimulatedEngine, drained: SimulatedEngine | None = None) -> None:
    text = "".join(
        f'[[engines]]\nbase_url = "{engine.base_url}"\ndrain = {str(engine is drained).lower()}\n'
        for engine in engines
    )
    new = path.with_suffix(".new")
    new.write_text(text or "engines = []\n")
    new.replace(path)


def from_file(path: Path, **changes: Any) -> FleetSettings:
    given: dict[str, Any] = {name: getattr(OFTEN, name) for name in OFTEN.__struct_fields__}
    return FleetSettings(**{**given, "file": FileSettings(path=str(path), interval_s=0.02), **changes})


async def test_engines_come_serve_are_drained_and_leave_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    async with running({}, {}) as (one, two):
        listed(path, one)
        async with routing(configure(fleet=from_file(path))) as rig:
            answer = await rig.chat("first")
            assert answer.headers["x-kvatlas-engine"] == one.base_url
            listed(path, one, two, drained=one)
            await until(lambda: len(rig.router.fleet) == 2, "the second came")
            await rig.ready()
            for _ in range(3):
                answer = await rig.chat("second")
                assert answer.headers["x-kvatlas-engine"] == two.base_url
            _, engines = await rig.ask("GET", "/kvatlas/engines")
            assert {e["engine"]: e["on_hold"] for e in engines} == {
                one.base_url: "drained in the file",
                two.base_url: "",
            }
            listed(path, two)
            await until(lambda: len(rig.router.fleet) == 1, "the first is forgotten")
            assert one.base_url not in rig.router.lifecycle.feeds.stats
            _, page = await rig.ask("GET", "/metrics")
            assert one.base_url not in page
            assert 'kvatlas_source_engines{source="file"} 1.0' in page
            _, sources = await rig.ask("GET", "/kvatlas/sources")
            assert sources["file"]["synced"]
            listed(path)
            await until(lambda: not len(rig.router.fleet), "all are gone")
            assert (await rig.ask("GET", "/ready"))[0] == 503
            status, _ = await rig.ask("POST", "/v1/completions", {"model": "m", "prompt": "x"})
            assert status == 503


async def test_a_held_engine_is_warm_when_its_hold_ends(tmp_path: Path) -> None:
    """Not ready yet, a new engine is followed anyway: nothing is cold when it takes requests."""
    path = tmp_path / "engines.toml"
    async with running({}, {}) as (one, two):
        listed(path, one, two, drained=two)
        async with routing(configure(fleet=from_file(path)), wait=False) as rig:
            await until(lambda: rig.router.readiness().ready, "ready by the first")
            await until(lambda: rig.router.fleet.get(two.base_url).feed_state == "ready", "warm")
            assert [s.engine_id for s in rig.router.fleet.ready(None)] == [one.base_url]


async def test_ready_waits_for_sources_to_be_heard_but_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.toml"
    async with running({}) as engines:
        patient = from_file(path, warm_up_s_max=1000.0)
        async with routing(configure(*engines, fleet=patient), wait=False) as rig:
            await until(lambda: bool(rig.router.fleet.ready(None)), "an engine is up")
            await until(lambda: "no such file" in rig.router.readiness().reason, "why it waits")
            status, body = await rig.ask("GET", "/ready")
            assert status == 503
            assert body["reason"].startswith("sources of engines without an answer yet: file (")
            listed(path, *engines)
            await until(lambda: rig.router.readiness().ready, "ready")
            path.unlink()
            await until(lambda: rig.router.fleet_sources.stats["file"].failing, "failing")
            assert rig.router.readiness().ready  # waited for once only
        hasty = from_file(tmp_path / "nowhere.toml", warm_up_s_max=0.01)
        async with routing(configure(*engines, fleet=hasty), wait=False) as rig:
            await until(lambda: rig.router.readiness().ready, "ready without")


async def test_outside_a_cluster_it_says_so_and_serves_what_it_knows(tmp_path: Path) -> None:
    kubernetes = KubernetesSettings(selector="app=vllm", credentials_dir=str(tmp_path))
    fleet = FleetSettings(poll_interval_s=0.1, warm_up_s_max=0.05, kubernetes=kubernetes)
    async with running({}) as engines, routing(configure(*engines, fleet=fleet), wait=False) as rig:
        await until(lambda: rig.router.readiness().ready, "ready with what is configured")
        stats = rig.router.fleet_sources.stats["kubernetes"]
        await until(lambda: "not inside a cluster" in stats.last_error, "said")
        assert "fleet.kubernetes.kubeconfig" in stats.last_error


async def test_too_many_engines_are_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    async with running({}, {}) as engines:
        listed(path, *engines)
        fleet = from_file(path, engines_max=1)
        async with routing(configure(fleet=fleet)) as rig:
            assert len(rig.router.fleet) == 1
            stats = rig.router.fleet_sources.stats["file"]
            assert stats.errors == {"fleet_full": 1}
            assert "1 servers over fleet.engines_max" in stats.last_error


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[fleet.kubernetes]\nselektor = 'a'",
            "unknown key fleet.kubernetes.selektor; did you mean fleet.kubernetes.selector? known: api,",
        ),
        ("[fleet.kubernetes]\nport_name = 'HTTP'", "fleet.kubernetes.port_name: 'HTTP' is not a port name"),
        ("[fleet.kubernetes]\nnamespaces = ['*', 'a']", "fleet.kubernetes.namespaces: * covers all"),
        ("[fleet.kubernetes]\nnamespaces = ['A b']", "fleet.kubernetes.namespaces: 'A b' is not a namespace"),
        ("[fleet.kubernetes]\nport = 0", "fleet.kubernetes.port: 0 is not a port number, 1 to 65535"),
        ("[fleet.kubernetes]\napi = 'x'", "fleet.kubernetes.api: 'x' is not http(s)://HOST:PORT"),
        ("[fleet.kubernetes]\ndeletion_costs = true", "fleet.kubernetes.deletion_costs: pods must be"),
        ("[fleet.dns]\nnames = ['vllm']", "fleet.dns.names: 'vllm' is neither HOST:PORT nor"),
        ("[fleet.dns]\nnames = ['_http.vllm']", "fleet.dns.names: '_http.vllm' is neither"),
        ("[fleet.dns]\nreplay_port = 5", "fleet.dns.replay_port: needs events_port"),
        ("[fleet.dns]\nevents_port = 0", "fleet.dns.events_port: 0 is not a port number, 1 to 65535"),
        ("[fleet.dns]\nevents_port = 65536", "fleet.dns.events_port: 65536 is not a port number, 1 to 65535"),
        ("[fleet.dns]\nservers = ['a:b']", "fleet.dns.servers: 'a:b' is not ADDRESS or"),
        ("[fleet]\nengines_max = 0", "fleet.engines_max = 0: expected a finite number, more than 0"),
        ("[fleet]\nfile = 'engines.toml'", "fleet.file: expected a table of settings, got 'engines.toml'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "kvatlas.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, environ={})
    assert str(error.value).startswith(told)


def test_flags_and_variables_reach_the_sources(tmp_path: Path) -> None:
    environ = {
        "KVATLAS_FLEET_KUBERNETES_SELECTOR": "app=vllm,tier in (a)",
        "KVATLAS_FLEET_KUBERNETES_NAMESPACES": "a, b",
    }
    flags = {"fleet.dns.names": "h:1,i:65535,_http._tcp.i", "fleet.engines_max": "7"}
    flags |= {"fleet.dns.events_port": "1", "fleet.dns.replay_port": "65535"}
    fleet = load(None, environ=environ, flags=flags).config.fleet
    assert fleet.kubernetes.selector == "app=vllm,tier in (a)"
    assert fleet.kubernetes.namespaces == ("a", "b")
    assert fleet.dns.names == ("h:1", "i:65535", "_http._tcp.i")
    assert (fleet.dns.events_port, fleet.dns.replay_port) == (1, 65535)
    assert fleet.engines_max == 7
    with pytest.raises(ConfigError, match="is not a known setting"):
        load(None, environ={"KVATLAS_FLEET_KUBERNETES": "x"})
    with pytest.raises(ConfigError, match="is not a known setting"):
        load(None, environ={}, flags={"fleet.kubernetes": "x"})
    path = tmp_path / "kvatlas.toml"
    path.write_text("[fleet]\nkubernetes = 5\n")
    with pytest.raises(ConfigError, match=r"fleet\.kubernetes: expected a table of settings, got 5"):
        load(path, environ={}, flags={"fleet.kubernetes.selector": "a=b"})


async def test_sources_end_with_the_router(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    listed(path)
    async with routing(configure(fleet=from_file(path)), wait=False) as rig:
        await until(lambda: rig.router.fleet_sources.stats["file"].synced, "heard")
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith(("source", "poll", "dns"))]
