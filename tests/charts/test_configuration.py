"""The configuration that the chart renders is what the real router reads: nothing drifts between the two."""

from __future__ import annotations

import asyncio
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.cli import app
from kvatlas.router.config.load import load
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import EngineAddress
from tests.charts.chart import MINIMAL, Rendered
from tests.charts.chart import load as read_values
from tests.charts.test_rendered import CASES, EVERYTHING, GATEWAY
from tests.support.kube_api import PODS, FakeKube, kube_api
from tests.support.kube_objects import Json, pod
from tests.support.paths import ROOT
from tests.support.waiting import until
from tests.support.whole_router import TEXT, routing, running

TOKENIZER = ROOT / "publisher" / "assets" / "demo_tokenizer"


def _mounted(rendered: Rendered, root: Path) -> str:
    """The rendered file with what a pod has mounted put under ``root``, and its paths changed to match."""
    text = rendered.toml
    for model in rendered.config.get("models", {}).values():
        if model.get("tokenizer", "").startswith("/"):
            shutil.copytree(TOKENIZER, root / model["tokenizer"].lstrip("/"), dirs_exist_ok=True)
    for mount in rendered.container["volumeMounts"]:
        path = mount["mountPath"]
        text = text.replace(f'"{path}/', f'"{root}{path}/').replace(f'"{path}"', f'"{root}{path}"')
    for name, secret in (
        ("engine-key/key", "sk-engine"),
        ("admin/token", "operator:" + "t" * 32),
        ("ops/token", "t" * 32),
        ("keys/keys.toml", f'[[keys]]\ntenant = "acme"\nname = "a"\nsha256 = "{"0" * 64}"\n'),
        ("keys/isolate.secret", "s" * 64),
        ("tls/tls.crt", ""),
        ("tls/tls.key", ""),
    ):
        file = root / "etc/kvatlas" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secret)
    return text


def _load(rendered: Rendered, directory: Path) -> Any:
    """Read the rendered file with the real parser."""
    file = directory / "kvatlas.toml"
    file.write_text(_mounted(rendered, directory))
    return load(file, environ={}).config


@pytest.mark.parametrize("name", CASES)
def test_the_router_reads_it(name: str, tmp_path: Path) -> None:
    config = _load(Rendered(CASES[name]), tmp_path)
    assert config.server.port == 8000
    assert config.server.host == "0.0.0.0"


def test_every_value_arrives(tmp_path: Path) -> None:
    values = {
        **EVERYTHING,
        "policy": "hash",
        "exposeDecision": True,
        "warmUpSeconds": 12,
        "config": {"proxy": {"first_byte_timeout_s": 42}, "policy": {"spread": 0.5}},
    }
    config = _load(Rendered(values), tmp_path)
    assert config.policy.policy == "hash"
    assert config.policy.spread == 0.5
    assert config.proxy.first_byte_timeout_s == 42
    assert config.server.expose_decision is True
    assert config.fleet.warm_up_s_max == 12
    assert config.models["*"].tokenizer == f"{tmp_path}/models/models/a/b"
    assert config.models["*"].mamba_cache_mode == "align"
    assert config.models["other.model"].tokenizer == f"{tmp_path}/models/models"
    assert config.models["other.model"].lora_paths == {"x": "/y"}
    assert config.fleet.api_key_file == f"{tmp_path}/etc/kvatlas/engine-key/key"
    assert config.fleet.kubernetes.selector == "app=vllm"
    assert config.fleet.kubernetes.namespaces == ("blue", "green")
    assert config.admin.enabled
    assert (config.admin.host, config.admin.port) == ("0.0.0.0", 8081)
    assert [engine.dp_rank for engine in config.engines] == [1]


def test_all_namespaces_and_a_service_for_readiness(tmp_path: Path) -> None:
    engines = {"selector": {"app": "vllm", "tier": "gpu"}, "clusterWide": True, "readyBy": "vllm"}
    found = _load(Rendered({"engines": engines}), tmp_path).fleet.kubernetes
    assert found.selector == "app=vllm,tier=gpu"
    assert found.namespaces == ("*",)
    assert found.service_selector == "kubernetes.io/service-name=vllm"


def test_a_picker_has_its_pool_its_ports_and_its_certificate(tmp_path: Path) -> None:
    config = _load(Rendered({**GATEWAY, "drainSeconds": 120, "drainDelaySeconds": 7}), tmp_path)
    assert (config.epp.listen, config.epp.health_listen) == ("0.0.0.0:9002", "0.0.0.0:9003")
    assert (config.epp.fallbacks, config.epp.drain_s_max, config.epp.drain_delay_s) == (2, 120, 7)
    assert config.epp.tls_cert_file == f"{tmp_path}/etc/kvatlas/tls/tls.crt"
    assert config.server.tls.cert is None
    kubernetes = config.fleet.kubernetes
    assert (kubernetes.inference_pool, kubernetes.selector) == ("qwen", "")
    assert kubernetes.namespaces == ("llm",)


def test_metrics_leave_the_pod_only_with_a_token_or_by_a_value(tmp_path: Path) -> None:
    by_token = {**MINIMAL, "ops": {"existingSecret": "ops"}, "serviceMonitor": {"enabled": True}}
    for values, served in ((MINIMAL, False), ({**MINIMAL, "ops": {"open": True}}, True), (by_token, True)):
        rendered = Rendered(values)
        config = _load(rendered, tmp_path)
        assert config.server.ops_port == 9001
        assert config.server.ops_host == ("0.0.0.0" if served else "127.0.0.1")
        assert ("ops" in [port["name"] for port in rendered.container["ports"]]) is served
        assert bool(config.ops_tokens) is (values is by_token)
    ports = rendered.one("Service", suffix="-ops")["spec"]["ports"]
    (endpoint,) = rendered.one("ServiceMonitor")["spec"]["endpoints"]
    assert [port["name"] for port in ports] == [endpoint["port"]]
    assert endpoint["authorization"] == {"credentials": {"name": "ops", "key": "token"}}


def test_the_admin_api_may_share_the_port(tmp_path: Path) -> None:
    values = {**MINIMAL, "admin": {"enabled": True, "existingSecret": "admin", "port": 0}}
    rendered = Rendered(values)
    assert _load(rendered, tmp_path).admin.port is None
    assert [port["name"] for port in rendered.container["ports"]] == ["http"]


def test_keys_and_certificates_are_where_the_router_looks(tmp_path: Path) -> None:
    rendered = Rendered({**MINIMAL, "keys": {"existingSecret": "keys"}, "tls": {"existingSecret": "cert"}})
    config = _load(rendered, tmp_path)
    assert config.keys.file == f"{tmp_path}/etc/kvatlas/keys/keys.toml"
    assert config.server.tls.cert == f"{tmp_path}/etc/kvatlas/tls/tls.crt"
    assert config.server.tls.key == f"{tmp_path}/etc/kvatlas/tls/tls.key"
    volumes = {volume["name"]: volume.get("secret") for volume in rendered.pod["volumes"]}
    assert volumes["keys"]["secretName"] == "keys"
    assert volumes["keys"]["items"] == [{"key": "keys.toml", "path": "keys.toml"}]
    assert volumes["tls"]["secretName"] == "cert"


def test_caches_are_isolated_by_a_secret_beside_the_keys(tmp_path: Path) -> None:
    keys = {"existingSecret": "keys", "isolate": "group", "isolateKey": "salt"}
    rendered = Rendered({**MINIMAL, "keys": keys})
    config = _load(rendered, tmp_path)
    assert config.keys.isolate == "group"
    assert config.keys.isolate_secret_file == f"{tmp_path}/etc/kvatlas/keys/isolate.secret"
    volumes = {volume["name"]: volume.get("secret") for volume in rendered.pod["volumes"]}
    assert {"key": "salt", "path": "isolate.secret"} in volumes["keys"]["items"]


def test_clients_of_the_router_use_its_scheme() -> None:
    for values, scheme in ((MINIMAL, "HTTP"), ({**MINIMAL, "tls": {"existingSecret": "cert"}}, "HTTPS")):
        rendered = Rendered(values)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert rendered.container[probe]["httpGet"]["scheme"] == scheme
        assert f"{scheme.lower()}://127.0.0.1:8000/v1/models" in rendered.notes
        (container,) = rendered.one("Pod", suffix="-test")["spec"]["containers"]
        assert f'base = "{scheme.lower()}://' in container["command"][2]


def test_deletion_costs_are_written_by_routers_that_may(tmp_path: Path) -> None:
    assert not _load(Rendered(MINIMAL), tmp_path).fleet.kubernetes.deletion_costs
    engines = {**MINIMAL["engines"], "deletionCosts": True}
    assert _load(Rendered({**MINIMAL, "engines": engines}), tmp_path).fleet.kubernetes.deletion_costs


@pytest.mark.parametrize(
    "values", sorted((ROOT / "tests" / "upgrade").glob("*/values.yaml")), ids=lambda p: p.parent.name
)
def test_values_of_a_release_still_start(tmp_path: Path, values: Path) -> None:
    config = _load(Rendered(read_values(values)), tmp_path)
    assert config.index.is_shared
    assert config.proxy.first_byte_timeout_s == 42
    assert config.models["*"].mamba_cache_mode == "align"


@pytest.mark.parametrize("share", ["blocks", "load"])
def test_routers_share_blocks_or_load(tmp_path: Path, share: str) -> None:
    for where in ({"url": "redis://cache:6379/0"}, {"existingSecret": "index"}):
        redis = {**where, "share": share}
        assert _load(Rendered({**MINIMAL, "redis": redis}), tmp_path).index.share == share
    alone = _load(Rendered({**MINIMAL, "redis": {"share": share}}), tmp_path).index
    assert not alone.is_shared, "nothing to share it through: not an error"


def test_fixed_engines_may_have_every_field(tmp_path: Path) -> None:
    """Also the roles of prefill and decode."""
    one = {"base_url": "http://a:8000", "events": "tcp://a:5557", "replay": "tcp://a:5558", "dp_rank": 0}
    one |= {"topic": "kv", "snapshot": "tcp://a:5559", "role": "both", "kind": "vllm", "kv_source": "a:5710"}
    assert set(one) == set(EngineAddress.__struct_fields__)
    (engine,) = _load(Rendered({"engines": {"static": [one]}}), tmp_path).engines
    assert msgspec.structs.asdict(engine) == one


def test_config_overrules_other_values(tmp_path: Path) -> None:
    config = _load(Rendered({**MINIMAL, "config": {"server": {"log_level": "debug"}}}), tmp_path)
    assert config.server.log_level == "debug"


def test_the_container_starts_the_real_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own arguments, the rendered file in place of the mounted one, a check instead of a start."""
    rendered = Rendered(MINIMAL)
    file = tmp_path / "kvatlas.toml"
    file.write_text(rendered.toml)
    arguments = [str(argument) for argument in rendered.container["args"]]
    mounted = "/etc/kvatlas/config/kvatlas.toml"
    assert f"--config={mounted}" in arguments
    arguments = [argument.replace(mounted, str(file)) for argument in arguments]
    with pytest.raises(SystemExit) as end:
        app([*arguments, "--check-config"])
    assert end.value.code == 0, capsys.readouterr().err


def _beside(kube: FakeKube, rendered: Rendered, tmp_path: Path) -> Config:
    """The rendered configuration of a router here."""
    config = _load(rendered, tmp_path)
    found = msgspec.structs.replace(
        config.fleet.kubernetes, api=kube.url, credentials_dir=str(tmp_path), namespaces=("llm",)
    )
    return msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, host="127.0.0.1", port=0, ops_port=0),
        fleet=msgspec.structs.replace(config.fleet, kubernetes=found),
    )


def _pod(number: int, engine: SimulatedEngine, ends_s: float | None = None) -> Json:
    """The pod of an engine; ``ends_s``: it terminates, and is killed then."""
    ports = {"http": int(engine.base_url.rpartition(":")[2])}
    one = pod(f"vllm-{number}", "127.0.0.1", namespace="llm", ports=ports, terminating=ends_s is not None)
    if ends_s is not None:
        one["metadata"]["deletionTimestamp"] = f"{datetime.fromtimestamp(ends_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return one


async def test_pods_that_end_one_after_another_lose_no_stream(tmp_path: Path) -> None:
    """Streams of 16 s, and pods whose grace period is 6 s."""
    values = {
        **MINIMAL,
        "engines": {"selector": {"app": "vllm"}},
        "model": {"tokenizer": {"existingClaim": "models", "path": "demo"}},
    }
    slow = {"decode_s_per_token": 0.04, "num_blocks": 4096}
    async with (
        kube_api() as kube,
        running(slow, slow, slow) as engines,
        routing(_beside(kube, Rendered(values), tmp_path), wait=False) as rig,
    ):

        async def answer(number: int) -> str:
            stream = await rig.api.chat.completions.create(
                model="kvatlas-demo",
                messages=[{"role": "user", "content": f"tell {number}"}],
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            pieces = [piece async for piece in stream]
            assert pieces[-1].choices[0].finish_reason == "length"
            return "".join(piece.choices[0].delta.content or "" for piece in pieces)

        await kube.put(PODS, _pod(0, engines[0]))
        await until(lambda: len(rig.router.fleet.ready(None)) == 1, "the first pod is there")
        await rig.ready()
        answers = [asyncio.ensure_future(answer(number)) for number in range(4)]
        for number, engine in enumerate(engines[:2]):
            await asyncio.sleep(2)
            await kube.put(PODS, _pod(number + 1, engines[number + 1]))
            await until(lambda: len(rig.router.fleet.ready(None)) == 1 + 1, "the next pod is there")
            await kube.put(PODS, _pod(number, engine, time.time() + 6))
            await asyncio.sleep(5)
            left = rig.router.fleet.get(engine.base_url)
            assert left is not None
            assert not left.answering
            await kube.delete(PODS, f"vllm-{number}", namespace="llm")
        await asyncio.gather(*answers)
        stats = rig.router.proxy.stats
        assert stats.streams_broken == 0
        assert stats.moves == {"warmed": 8}
        rig.check_books()


async def test_its_router_finds_a_pod_and_proves_a_prediction(tmp_path: Path) -> None:
    """The rendered file, an API server's stand-in, one engine: a second turn's hit is as predicted."""
    rendered = Rendered({**MINIMAL, "exposeDecision": True})
    async with (
        kube_api() as kube,
        running({}) as (engine,),
        routing(_beside(kube, rendered, tmp_path), wait=False) as rig,
    ):
        await kube.put(PODS, _pod(0, engine))
        await until(lambda: len(rig.router.fleet) == 1, "the pod is an engine")
        await rig.ready()
        await rig.chat(TEXT * 20)
        await rig.caught_up(engine)
        await rig.chat(TEXT * 20)
        receipts = await rig.ok("GET", "/kvatlas/receipts")
        assert [receipt["outcome"] for receipt in receipts] == ["exact", "exact"]
        assert any(receipt["actual_tokens"] for receipt in receipts)
