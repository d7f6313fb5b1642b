"""Every text of a configuration has a syntax or a set of values, and a wrong one is refused at start."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from kvatlas.router.config.checks import RULES
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import load, parse_engine, variable
from kvatlas.router.config.removed import REMOVED
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.setting_texts import near_names
from tests.support.paths import ROOT

WRONG: dict[str, str] = {
    "server.host": "http://0.0.0.0",
    "server.ops_host": "300.1.1.1",
    "server.ops_names": "ops.example:9001",
    "server.ops_token_file": " ",
    "server.tls_cert_file": "",
    "server.tls_key_file": "a\nb",
    "server.client_ca_file": "",
    "fleet.api_key_file": "",
    "fleet.ca_file": "",
    "fleet.client_cert_file": "",
    "fleet.client_key_file": "",
    "fleet.file.path": "",
    "fleet.dns.names": "engines",
    "fleet.dns.servers": "dns.example",
    "fleet.kubernetes.selector": "app=vllm app=other",
    "fleet.kubernetes.inference_pool": "My Pool",
    "fleet.kubernetes.service_selector": "a in (b",
    "fleet.kubernetes.namespaces": "Prod!",
    "fleet.kubernetes.port_name": "HTTP",
    "fleet.kubernetes.events_port_name": "kv_events",
    "fleet.kubernetes.replay_port_name": "",
    "fleet.kubernetes.kubeconfig": "",
    "fleet.kubernetes.api": "https://k8s:port",
    "fleet.kubernetes.credentials_dir": "",
    "policy.policy": "hsah",
    "proxy.refused_paths": "sleep",
    "proxy.passed_paths": "/a?b",
    "cors.allowed_origins": "https://a.example/",
    "cors.allowed_methods": "GET POST",
    "cors.allowed_headers": "x:y",
    "prompts.hub_endpoint": "hub.example.com",
    "prompts.renderers": "http://h:8000/v1",
    "index.url": "h:6379",
    "index.replica": "\n",
    "index.namespace": "a b",
    "admin.token_file": "",
    "admin.host": "",
    "admin.tls_cert_file": "",
    "admin.tls_key_file": "",
    "admin.client_ca_file": "",
    "epp.listen": "9002",
    "epp.health_listen": "h:http",
    "epp.tls_cert_file": "",
    "epp.tls_key_file": "",
    "epp.client_ca_file": "",
    "keys.file": "",
    "keys.isolate_secret_file": "",
    "keys.secret_file": "",
    "traces.endpoint": "http://h:4318/v1/traces",
    "traces.service_name": " kvatlas",
    "usage.path": "/nowhere/at/all",
    "usage.key_file": "/nowhere/at/all",
    "models.tokenizer": "/nowhere",
    "models.time_zone": "Mars/North",
    "models.lora_paths": "",
    "models.hash_seeds": "a b",
    "models.kinds": "odd",
    "models.shared_stores": "",
}
"""A text that each setting refuses."""

NEEDS: dict[str, dict[str, Any]] = {
    "admin": {"admin.enabled": True, "admin.port": 1, "admin.token_file": "t"},
    "index": {"index.url": "redis://h"},
    "epp": {"epp.listen": "h:1"},
}
"""Key without which a section is not read."""

FREE = {"models.chat_template"}
"""A path or a text of any kind, tried where the tokenizer is loaded."""


def texts(struct: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    """Keys whose values hold free texts."""
    for field in msgspec.structs.fields(struct):
        key, kind = f"{prefix}{field.name}", field.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from texts(kind, f"{key}.")
        elif holds_text(kind):
            yield key


def holds_text(kind: Any) -> bool:
    if get_origin(kind) is Literal or kind is Any:
        return False
    if get_origin(kind) in {Union, types.UnionType, tuple, frozenset}:
        return any(holds_text(part) for part in get_args(kind))
    if get_origin(kind) is dict:
        return holds_text(get_args(kind)[1])
    return kind is str


def test_every_text_of_the_tree_has_a_rule_and_a_case_here() -> None:
    tree = [key for f in msgspec.structs.fields(Config) if f.name != "aliases" for key in section(f)]
    assert set(tree) == set(RULES)
    assert set(RULES) - FREE == set(WRONG)


def section(field: Any) -> Iterator[str]:
    if field.name == "models":
        yield from texts(ModelConfig, "models.")
    elif field.name not in {"engines", "stores"}:
        yield from texts(field.type, f"{field.name}.")


@pytest.mark.parametrize("key", [key for key in WRONG if not key.startswith("models.")])
def test_a_wrong_text_is_refused_by_name(key: str) -> None:
    section = key.rpartition(".")[0]
    with pytest.raises(ConfigError) as error:
        load(environ={}, flags={**NEEDS.get(section, {}), key: WRONG[key]})
    last = key.rpartition(".")[2]
    assert last in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [key for key in WRONG if key.startswith("models.")])
def test_a_wrong_text_of_a_model_is_refused_by_name(key: str) -> None:
    name, text = key.removeprefix("models."), WRONG[key]
    value: Any = {"0": text} if name in {"lora_paths", "kinds"} else text
    with pytest.raises(ConfigError, match=rf"models\.m\.{name}"):
        load(environ={}, models={"m": {name: value if name != "shared_stores" else [text]}})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("server.host", "::"),
        ("server.host", "router-0.kvatlas.svc.cluster.local"),
        ("server.ops_host", "localhost"),
        ("fleet.kubernetes.selector", "app=vllm,tier in (a, b),!old,x.io/y!=z,llm"),
        ("fleet.kubernetes.api", "http://127.0.0.1:8001"),
        ("cors.allowed_origins", "https://a.example:8443,http://localhost"),
        ("cors.allowed_headers", "x-session-id,*"),
        ("proxy.passed_paths", "/reset_prefix_cache"),
        ("traces.endpoint", "https://collector:4318/otlp"),
        ("epp.listen", "[::]:9002"),
        ("prompts.renderers", "http://[::1]:8000"),
    ],
)
def test_valid_texts_are_accepted(key: str, text: str) -> None:
    load(environ={}, flags={key: text})


@pytest.mark.parametrize("seed", ["0", "random", "4294967295"])
def test_seeds_that_python_takes(seed: str) -> None:
    load(environ={}, models={"m": {"hash_seeds": [seed]}})


@pytest.mark.parametrize("seed", ["a b", "-1", "4294967296", "1.5", "", "٣"])
def test_seeds_with_which_python_does_not_start(seed: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.hash_seeds.*whole number from 0"):
        load(environ={}, models={"m": {"hash_seeds": [seed]}})


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"mamba_cache_mode": "alll"}, "expected align, all; did you mean all"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ({"attention_chunk_sizes": {"1": -5}}, "attention_chunk_sizes"),
        ({"windows": {"1": 0}}, "windows"),
        ({"eagle_groups": [-1]}, "eagle_groups"),
        ({"eagle_groups": "some"}, "eagle_groups"),
        ({"replay_tokens": -1}, "replay_tokens = -1"),
        ({"eagle_groups": ["one"]}, "expected a list of whole numbers"),
        ({"windows": {"1": "wide"}}, "expected a table of whole numbers"),
    ],
)
def test_facts_of_a_model_are_checked_at_start(facts: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(environ={}, models={"m": facts})
    assert told.replace("expected align", "expected one of align") in str(error.value)


@pytest.mark.parametrize(
    "key", ["fleet.poll_timeout_s", "listen.drain_s_max", "index.lease_s", "queue.wait_s_max"]
)
def test_times_that_no_clock_can_wait_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(environ={}, flags={key: "1e300"})


@pytest.mark.parametrize("key", ["listen.connections_max", "fleet.engines_max", "queue.requests_max"])
def test_counts_that_no_protocol_can_carry_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(environ={}, flags={key: str(1 << 40)})


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("http://h:8000/v1", "leave out /v1"),
        ("http://h:8000/v1/", "leave out /v1"),
        ("http://h:8000/proxy/v1/chat/completions", "leave out /v1/chat/completions"),
        ("http://h h:8000", "expected http://HOST:PORT"),
        ("http://h:8000?x=1", "leave out what follows the path"),
        ("http://[::1:8000", "expected http://HOST:PORT"),
    ],
)
def test_the_base_url_of_an_engine(url: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse_engine(url)
    assert remedy in str(error.value)
    file = tmp_path / "k.toml"
    file.write_text(f'[[engines]]\nbase_url = "{url}"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(file, environ={})
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("tcp://*:5557", "give the engine's host instead of *"),
        ("tcp://h", "is not tcp://HOST:PORT"),
        ("tcp://h:0", "is not tcp://HOST:PORT"),
        ("tcp://h:70000", "is not tcp://HOST:PORT"),
        ("ipc://", "is not a tcp:// or ipc:// address"),
    ],
)
def test_the_event_address_of_an_engine(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match="engine") as error:
        parse_engine(f"http://h:1,events={address}")
    assert told in str(error.value)


def test_a_path_before_v1_and_addresses_of_ipv6_are_taken() -> None:
    assert parse_engine("http://h:8000/engine-1") == EngineAddress("http://h:8000/engine-1")
    engine = parse_engine("http://[fd00::1]:8000,events=tcp://[fd00::1]:5557")
    assert engine.events == "tcp://[fd00::1]:5557"


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"flags": {"tls.cert": "x"}}, "server.tls_cert_file"),
        ({"flags": {"server.ops-port": "1"}}, "server.ops_port"),
        ({"flags": {"polcy.spread": "1"}}, "policy.spread"),
        ({"flags": {"spread": "1"}}, "policy.spread"),
        ({"flags": {"server.drain_s_max": "1"}}, "listen.drain_s_max"),
        ({"environ": {"KVATLAS_SERVER__PORT": "1"}}, "KVATLAS_SERVER_PORT"),
        ({"environ": {"KVATLAS_SERVR_PORT": "1"}}, "KVATLAS_SERVER_PORT"),
        ({"environ": {"KVATLAS_LISTN_DRAIN_S_MAX": "1"}}, "KVATLAS_LISTEN_DRAIN_S_MAX"),
        ({"models": {"m": {"tokeniser": "x"}}}, "models.m.tokenizer"),
        ({"flags": {"proxy.kv_cache_report_mode": "refused"}}, "refuse"),
    ],
)
def test_an_unknown_name_gets_the_near_one(options: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(**{"environ": {}, **options})
    assert f"did you mean {meant}" in str(error.value)


def test_a_name_beside_a_much_nearer_one_is_not_offered() -> None:
    assert near_names("events", ["event", "events", "evens"]) == ["events"]


def test_an_unknown_key_of_the_file_and_of_engines_gets_the_near_one(tmp_path: Path) -> None:
    for text, meant in (
        ("[polcy]\nspread = 1", "policy"),
        ("[server]\nclient_share_max = 1", "listen.client_share_max"),
        ('[[engines]]\nbase-url = "http://h"', "engines[0].base_url"),
    ):
        file = tmp_path / "k.toml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            load(file, environ={})
        assert f"did you mean {meant}?" in str(error.value)
    with pytest.raises(ConfigError, match="did you mean role"):
        parse_engine("http://h,rol=prefill")
    with pytest.raises(ConfigError, match=r"expected one of prefill, decode, both; did you mean prefill"):
        parse_engine("http://h,role=prefil")
    with pytest.raises(ConfigError, match="dp-rank=x: expected a whole number"):
        parse_engine("http://h,dp-rank=x")


@pytest.mark.parametrize("key", ["models.m.tokenizer", "engines", "engines.base_url", "aliases.gpt"])
def test_a_table_given_as_a_flag_is_refused_with_its_place_in_the_file(key: str) -> None:
    with pytest.raises(ConfigError, match="--config file"):
        load(environ={}, flags={key: "x"})


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    for load_it in (
        lambda: load(path, environ={}),
        lambda: load(environ={}, index_file=path),
        lambda: load(environ={}, flags={"fleet.api_key_file": str(path)}),
        lambda: load(environ={}, flags={"fleet.kubernetes.kubeconfig": str(path)}),
    ):
        with pytest.raises(ConfigError) as error:
            load_it()
        assert str(error.value).count(str(path)) == 1
        assert "Errno" not in str(error.value)


def test_an_empty_file_for_the_index_is_not_taken_for_no_index(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=rf"--index-file {path}: is empty; .*redis://"):
        load(environ={}, index_file=path)


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_removed_key_is_refused_with_what_happens_now(key: str, tmp_path: Path) -> None:
    section, _, name = key.rpartition(".")
    path = tmp_path / "kvatlas.toml"
    path.write_text(f"[{section}]\n{name} = 1\n")
    now = re.escape(REMOVED[key])
    for load_it in (lambda: load(path, environ={}), lambda: load(environ={}, flags={key: "1"})):
        with pytest.raises(ConfigError, match=rf"^{key} is not a setting any more: {now}; leave it out"):
            load_it()
    with pytest.raises(ConfigError, match=f"{variable(section, name)} is not a setting any more: {now}"):
        load(environ={variable(section, name): "1"})


def test_the_decision_page_names_every_removed_key() -> None:
    page = (ROOT / "docs/decisions/042-settings.md").read_text(encoding="utf-8")
    assert not [
        key for key in REMOVED if f"`{key}`" not in page and f"`{key.rpartition('.')[2]}`" not in page
    ]


def test_no_page_names_a_removed_key_as_a_setting() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]
    named = {(page.name, key) for page in pages for key in REMOVED if key in page.read_text(encoding="utf-8")}
    assert not named


def test_variables_of_kubernetes_services_are_ignored() -> None:
    environ = {
        "KVATLAS_SERVICE_PORT": "8000",
        "KVATLAS_SERVICE_PORT_HTTP": "8000",
        "KVATLAS_SERVER_SERVICE_HOST": "10.0.0.1",
        "KVATLAS_SERVR_PORT": "tcp://10.0.0.1:80",
        "KVATLAS_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KVATLAS_TRACEBACK": "1",
    }
    assert load(environ=environ).config == Config()
