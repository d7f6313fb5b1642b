"""One configuration from four sources, and the changes that a running router applies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.key_file import KeySettings
from kvatlas.router.api.admin_auth import AdminSettings
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import SECTIONS, describe, load, parse_engine, plain_keys, start
from kvatlas.router.config.reload import LIVE, changes
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FileSettings, FleetSettings
from kvatlas.router.placement.shadow import Shadow
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.startup_check import check

EXAMPLE = f"""
[server]
port = 9000
expose_decision = true

[[engines]]
base_url = "http://10.0.0.1:8000/"

[[engines]]
base_url = "http://10.0.0.2:8000"
events = "tcp://10.0.0.2:5557"
replay = "tcp://10.0.0.2:5558"
topic = "kv"
dp_rank = 1

[models."org/name"]
tokenizer = "{DEMO_TOKENIZER_DIR}"
retention_interval = "dense"
lora_paths = {{ sql = "/adapters/sql" }}
kinds = {{ 0 = "full_attention", 1 = "sliding_window" }}
windows = {{ 1 = 128 }}
attention_chunk_sizes = {{ 2 = 64, 3 = 8192 }}
eagle_groups = [0]

[models."org/name".shadow]
num_blocks = 5000
sliding_window = 128

[policy]
policy = "hash"
spread = 0.5
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvatlas.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(tmp_path: Path, text: str = "", **options: Any) -> str:
    """The one line that says what is wrong."""
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, text), **{"environ": {}, **options})
    message = str(error.value)
    assert "\n" not in message
    return message


STORE = '[[stores]]\nname = "a"\nkind = "mooncake"\nevents = ["tcp://h:1"]\nmodel = "m"\n'


def test_stores_of_a_file_can_be_reloaded(tmp_path: Path) -> None:
    one, two = (
        load(write(tmp_path, text), environ={}).config for text in (STORE, STORE + "tensor_parallel = 4")
    )
    assert two.stores == (
        StoreSettings(name="a", kind="mooncake", events=("tcp://h:1",), model="m", tensor_parallel=4),
    )
    assert changes(one, two).taken == ("stores",)
    assert changes(one, two).config == two


def test_a_file_with_engines_models_and_policy(tmp_path: Path) -> None:
    config = load(write(tmp_path, EXAMPLE), environ={}).config
    assert config.server.port == 9000
    assert config.engines == (
        EngineAddress("http://10.0.0.1:8000"),
        EngineAddress("http://10.0.0.2:8000", 1, "tcp://10.0.0.2:5557", "tcp://10.0.0.2:5558", "kv"),
    )
    model = config.model("org/name")
    assert model.facts().retention_interval == "dense"
    assert model.facts().kinds == {0: "full_attention", 1: "sliding_window"}
    assert model.facts().windows == {1: 128}
    assert model.facts().attention_chunk_sizes == {2: 64, 3: 8192}
    assert model.facts().eagle_groups == (0,)
    assert model.prompts().lora_paths == {"sql": "/adapters/sql"}
    assert model.shadow_spec().num_blocks == 5000
    assert [group.sliding_window for group in model.shadow_spec().groups] == [None, 128]
    assert (config.policy.policy, config.policy.spread) == ("hash", 0.5)
    assert config.model("another").tokenizer == "auto"
    check(config)


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "[policy]\nload_s_per_token = 0.1\nspread = 0.1\nengine_priority = 0.1\n")
    environ = {"KVATLAS_POLICY_SPREAD": "0.2", "KVATLAS_POLICY_ENGINE_PRIORITY": "0.2"}
    loaded = load(path, environ=environ, flags={"policy.engine_priority": "0.3"})
    policy = loaded.config.policy
    values = (policy.retention_hints, policy.load_s_per_token, policy.spread, policy.engine_priority)
    assert values == (False, 0.1, 0.2, 0.3)
    assert loaded.sources == {
        "policy.load_s_per_token": f"file {path}",
        "policy.spread": "environment KVATLAS_POLICY_SPREAD",
        "policy.engine_priority": "flag",
    }
    told = describe(loaded).splitlines()
    assert f"policy.load_s_per_token = 0.1  # file {path}" in told
    assert "policy.spread = 0.2  # environment KVATLAS_POLICY_SPREAD" in told
    assert "policy.engine_priority = 0.3  # flag" in told
    assert "policy.retention_hints = false  # default" in told


def test_engines_by_flag_take_the_place_of_those_in_the_file(tmp_path: Path) -> None:
    given = (parse_engine("http://h:1"),)
    loaded = load(write(tmp_path, EXAMPLE), environ={}, engines=given)
    assert loaded.config.engines == given
    assert 'engines[0].base_url = "http://h:1"  # flag' in describe(loaded)


def test_models_by_flag_are_added_to_those_in_the_file(tmp_path: Path) -> None:
    models = {ANY_MODEL: {"tokenizer": str(DEMO_TOKENIZER_DIR)}}
    config = load(write(tmp_path, EXAMPLE), environ={}, models=models).config
    assert set(config.models) == {"org/name", ANY_MODEL}
    assert config.model("another").tokenizer == str(DEMO_TOKENIZER_DIR)


def test_every_value_that_is_described_can_be_set(tmp_path: Path) -> None:
    """The description is a complete list: what it names, environment and flags can name."""
    described = describe(load(None, environ={}))
    for section in SECTIONS:
        for name in plain_keys(section):
            assert re.search(rf"^{re.escape(section)}\.{name} = ", described, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[policy]\nspred = 1",
            "unknown key policy.spred; did you mean policy.spread? known: engine_priority,",
        ),
        (
            "[usage]\npath = '/nowhere/a.jsonl'",
            "usage.path = '/nowhere/a.jsonl': expected a file in a folder that can be written",
        ),
        ("[queue]\nwait_target_s = 0", "queue.wait_target_s = 0.0: expected seconds, more than 0"),
        ("[queue]\nwait_target_low_s = inf", "queue.wait_target_low_s = inf: expected a finite number"),
        ("[queue]\nwait_target_s = 'soon'", "queue.wait_target_s = 'soon'"),
        ("[usage]\nfiles_max = 0", "usage.files_max = 0: expected a finite number"),
        (
            "[polcy]\nspread = 1",
            "unknown key polcy; did you mean policy? known: admin, aliases, cors, engines, epp, fleet,",
        ),
        ("policy = 3", "policy: expected a table of settings, got 3"),
        ('[policy]\nspread = "high"', "policy.spread = 'high': expected a number"),
        ("[policy]\nspread = -1", "policy.spread must"),
        ("[policy]\nspread = nan", "policy.spread must"),
        ('[server]\nport = "http"', "server.port = 'http': expected a whole number"),
        ("[server]\nport = 70000", "server.port: 70000 is not a port number, 0 to 65535"),
        ('[server]\nlog_level = "loud"', "server.log_level = 'loud': expected one of debug,"),
        ('[server]\nlog_format = "xml"', "server.log_format = 'xml': expected one of console, json"),
        ("[fleet]\npoll_interval_s = 0", "fleet.poll_interval_s must be positive"),
        (
            '[index]\nurl = "redis://a"\nshare = "load"\ncode_bytes = 2',
            "index.code_bytes = 2: is for look-ups of blocks, and there are none with share = 'load'",
        ),
        (
            '[index]\nurl = "redis://a"\nshare = "load"\nlookup_timeout_s = 1.0',
            "index.lookup_timeout_s = 1.0: is for look-ups of blocks",
        ),
        ('[index]\nshare = "all"', "index.share = 'all': expected one of blocks, load"),
        ("[index]\nlease_s = 0", "index.lease_s = 0.0: expected a finite number, more than 0"),
        ("[proxy]\nattempts_max = 0", "proxy.attempts_max = 0: expected a finite number, more than 0"),
        ("[proxy]\nconnect_timeout_s = inf", "proxy.connect_timeout_s = inf: expected a finite number"),
        ("[listen]\ndrain_s_max = -1", "listen.drain_s_max = -1.0: expected a finite number, 0 or more"),
        ("[prompts]\nworker_threads = 0", "prompts.worker_threads = 0: expected a finite number"),
        ("engines = 3", "engines = 3: expected a list of tables"),
        ("engines = [3]", "engines[0]: expected a table of settings, got 3"),
        ('[[engines]]\nevents = "tcp://h:1"', "engines[0]: base_url must be given"),
        (
            '[[engines]]\nurl = "http://h"',
            "unknown key engines[0].url; did you mean engines[0].base_url? known: base_url,",
        ),
        ('[[engines]]\nbase_url = "h:1"', "engine 'h:1': expected http://HOST:PORT"),
        (
            '[[engines]]\nbase_url = "wss://h"',
            "engine 'wss://h': expected http://HOST:PORT or https://HOST:PORT",
        ),
        ('[[engines]]\nbase_url = "http://h:99999"', "engine 'http://h:99999': expected http://HOST:PORT"),
        ('[[engines]]\nbase_url = "http://u:p@h"', "expected http://HOST:PORT"),
        ('[[engines]]\nbase_url = "http://h"\nevents = "h:5557"', "events='h:5557' is not a tcp://"),
        ('[[engines]]\nbase_url = "http://h"\nreplay = "tcp://h:1"', "replay= needs events="),
        ('[[engines]]\nbase_url = "http://h"\ndp_rank = -1', "dp_rank=-1 is negative"),
        ('[[engines]]\nbase_url = "http://h"\nkv_source = "h"', "kv_source='h' is not HOST:PORT"),
        ('pull.enabled = true\npolicy.policy = "hash"', 'pull.enabled: policy.policy = "hash" compares no'),
        (
            'pull.enabled = true\n[[engines]]\nbase_url = "http://h"\nrole = "both"',
            "pull.enabled: http://h has role=both, and engines with roles do not pull",
        ),
        ("pull.gbit_s = 0", "pull.gbit_s"),
        (
            '[[engines]]\nbase_url = "http://h"\n[[engines]]\nbase_url = "http://h/"',
            "engines: http://h is listed twice; list it once, or each of its ranks with dp_rank",
        ),
        (
            '[[engines]]\nbase_url = "http://h"\n[[engines]]\nbase_url = "http://H:80"',
            "engines: http://H:80 is listed twice, also as http://h; list it once",
        ),
        (
            "\n".join(f'[[engines]]\nbase_url = "http://{name}"\nevents = "tcp://a:1"' for name in "ab"),
            "engines: http://b has the same events=tcp://a:1 as http://a; give each engine its own address",
        ),
        ("stores = 3", "stores = 3: expected a list of tables"),
        ("ops_port = 3", "unknown key ops_port; did you mean server.ops_port?"),
        ("[aliases.a]\nb = -1", "aliases.a.b = -1.0: expected a weight, 0 or more"),
        (STORE.replace("model", "modle"), "unknown key stores[0].modle; did you mean stores[0].model?"),
        (STORE.replace('name = "a"', ""), "stores[0]: name must be given"),
        (STORE.replace("mooncake", "s3"), "stores[0].kind = 's3': expected one of mooncake, lmcache"),
        (STORE.replace("tcp://h:1", "h:1"), "stores[0].events: 'h:1' is not a tcp:// or ipc:// address"),
        (STORE.replace("//h", "//*"), "stores[0].events: 'tcp://*:1' is where the store listens"),
        (STORE + "tensor_parallel = 0", "stores[0].tensor_parallel: 0 is not from 1 to 1024"),
        (STORE + 'engines = ["h:1"]', "stores[0].engines: 'h:1': expected http://HOST:PORT"),
        (STORE + 'key_model = " "', "stores[0].key_model: ' ': expected 1 to 200 printable characters"),
        (STORE + STORE, "stores[1].name: a twice"),
        ("models = 3", "models = 3: expected a table of tables"),
        (
            "[models.m]\ntokeniser = 1",
            "unknown key models.m.tokeniser; did you mean models.m.tokenizer? known: ",
        ),
        ("[models.m]\ntokenizer = 7", "models.m.tokenizer = 7: expected a text"),
        (
            '[models.m]\ntokenizer = "/nowhere"',
            "models.m.tokenizer: /nowhere is not a directory with a token",
        ),
        (
            '[models.m]\ntokenizer = "https://huggingface.co/org/name/tree/main"',
            (
                "models.m.tokenizer: https://huggingface.co/org/name/tree/main is a URL; give the name of "
                "the repository, org/name"
            ),
        ),
        ('[models.m]\nchat_template = "/no/such.jinja"', "models.m.chat_template: '/no/such.jinja': no such"),
        ('[models.m]\nchat_template = "missing.jinja"', "chat_template: 'missing.jinja': no such file"),
        ('[models.m]\nchat_template = "{% for m in %}"', "no Jinja template: line 1: "),
        ('[models.m]\nchat_template = "{{ messages }}{% endif %}"', "no Jinja template: line 1: "),
        ('[models.m]\nretention_interval = "x"', "models.m.retention_interval = 'x'"),
        ("[models.m]\nretention_interval = -16", "models.m.retention_interval = -16: 0 or more"),
        ('[models.m]\nkinds = {a = "mamba"}', "models.m.kinds: keys must be group numbers"),
        ('[models.m]\nkinds = {0 = "odd"}', "models.m.kinds: group 0: unknown kv_cache_spec_kind 'odd'"),
        ("[models.m.shadow]\nnum_blocks = 0", "models.m.shadow: num_blocks 0"),
        ("[models.m.shadow]\nblock_size = -16", "models.m.shadow: group 0"),
        ("[models.m]\neagle_groups_apart = true", "models.m.eagle_groups_apart: expected the numbers"),
        (
            '[models.m]\neagle_groups = "all"\neagle_groups_apart = true',
            "models.m.eagle_groups_apart: expected the numbers of the drafter's groups in eagle_groups",
        ),
        ("[models.m]\neagle_groups = [-1]", "models.m.eagle_groups: -1 is not the number of a group"),
        (
            "[models.m.shadow]\nblocks = 1",
            "unknown key models.m.shadow.blocks; did you mean models.m.shadow.num_blocks or ",
        ),
        ("no toml", "kvatlas.toml: "),
    ],
)
def test_a_fault_is_named_by_key_and_value(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text)


def test_chat_templates_that_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% generation %}{{ messages }}{% endgeneration %}")
    for text in (str(file), "tool_use", "{{ messages }}"):
        model = load(write(tmp_path, f"[models.m]\nchat_template = '{text}'"), environ={}).config.model("m")
        assert model.chat_template == text
    file.write_text("{% if %}")
    assert "no Jinja template: line 1: " in refused(tmp_path, f"[models.m]\nchat_template = '{file}'")
    file.write_bytes(b"\xff\xfe{}")
    assert "no text in UTF-8" in refused(tmp_path, f"[models.m]\nchat_template = '{file}'")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[queue]\nengine_requests_max = 8",
            ["queue.engine_requests_max has no effect without queue.saturation_s"],
        ),
        ("[queue]\nengine_requests_max = 8\nsaturation_s = 1", []),
        ("[pull]\ngbit_s = 10", ["pull.gbit_s has no effect without pull.enabled"]),
        ("[index]\nlease_s = 9", ["index.lease_s has no effect without index.url"]),
        ('[index]\nshare = "load"', ["index.share has no effect without index.url"]),
        (
            "[fleet.kubernetes]\nnamespaces = ['a']",
            [
                (
                    "fleet.kubernetes.namespaces has no effect without fleet.kubernetes.selector or "
                    "fleet.kubernetes.service_selector or fleet.kubernetes.inference_pool"
                )
            ],
        ),
        ("[policy]\nspread = 0.5", []),
        (
            "[policy]\nslo_ttft_ms_low = 9",
            ["policy.slo_ttft_ms_low has no effect without policy.service_levels"],
        ),
        ("[policy]\nslo_ttft_ms_low = 9\nservice_levels = true", []),
        ("[fleet]\nprobes_max = 9", ["fleet.probes_max has no effect without fleet.probe"]),
        ("[admin]\nhost = '127.0.0.2'", ["admin.host has no effect without admin.enabled"]),
        ("[admin]\ntoken_file = 'a'", ["admin.token_file has no effect without admin.enabled"]),
        ("[admin]\ntoken_file = 'a'\n[server]\nops_host = '0.0.0.0'", []),
        ("[queue]\nwait_target_s = 3\nwait_target_low_s = 1", []),
        ("[fleet.kubernetes]\nservice_selector = 'a=b'\nport_name = 'api'", []),
        ("[epp]\nfallbacks = 2", ["epp.fallbacks has no effect without epp.listen"]),
        (
            "[cors]\nallowed_origins = []\nallowed_methods = ['GET']",
            ["cors.allowed_methods has no effect without cors.allowed_origins"],
        ),
    ],
)
def test_settings_without_effect_are_named(tmp_path: Path, text: str, told: list[str]) -> None:
    assert list(load(write(tmp_path, text), environ={}).unused) == told


def test_engines_of_the_file_beside_those_of_the_command_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, '[[engines]]\nbase_url = "http://a"\n[queue]\nwait_s_max = 9')
    engines = (parse_engine("http://b"),)
    loaded = load(file, environ={}, engines=engines)
    assert [engine.base_url for engine in loaded.config.engines] == ["http://b"]
    assert start(lambda: loaded, lambda _: None, lambda *_: 0, print_config=False, check_config=True) == 0
    told = capsys.readouterr()
    assert told.out == "configuration ok\n"
    assert told.err.splitlines() == [
        f"kvatlas: engines of file {file} have no effect beside --engine",
        "kvatlas: queue.wait_s_max has no effect without queue.saturation_s",
    ]


def test_a_check_names_every_file_that_cannot_be_read(tmp_path: Path) -> None:
    text = (
        f"[server]\nops_token_file = '{tmp_path}/a'\n[fleet.file]\npath = '{tmp_path}/b'\n"
        f"[keys]\nfile = '{tmp_path}/c'\n[usage]\npath = '{tmp_path}/made-at-the-start'"
    )
    loaded = load(write(tmp_path, text), environ={})
    with pytest.raises(ConfigError) as refused:
        start(lambda: loaded, lambda _: None, lambda *_: 0, print_config=False, check_config=True)
    assert str(refused.value).splitlines() == [
        f"{key} = '{tmp_path}/{name}': cannot be read: there is no such file"
        for key, name in (("server.ops_token_file", "a"), ("fleet.file.path", "b"), ("keys.file", "c"))
    ]


def test_unknown_variables_are_refused(tmp_path: Path) -> None:
    assert "KVATLAS_POLICY_SPRED" in refused(tmp_path, environ={"KVATLAS_POLICY_SPRED": "1"})
    assert "policy.spread = 'x'" in refused(tmp_path, environ={"KVATLAS_POLICY_SPREAD": "x"})


def test_other_programs_variables_are_none_of_our_business() -> None:
    environ = {"KVATLAS_PORT": "tcp://10.0.0.1:80", "KVATLAS_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    assert load(None, environ=environ).config == Config()  # as Kubernetes sets for a service "kvatlas"


def test_environment_texts_become_values() -> None:
    environ = {
        "KVATLAS_SERVER_EXPOSE_DECISION": "true",
        "KVATLAS_SERVER_PORT": "8123",
        "KVATLAS_PROMPTS_HUB_DOWNLOADS": "false",
        "KVATLAS_PROXY_CONNECT_TIMEOUT_S": "1.5",
    }
    config = load(None, environ=environ).config
    assert (config.server.expose_decision, config.server.port) == (True, 8123)
    assert (config.prompts.hub_downloads, config.proxy.connect_timeout_s) == (False, 1.5)


def test_unknown_flags_are_refused(tmp_path: Path) -> None:
    assert "polcy.spread is not a known setting" in refused(tmp_path, flags={"polcy.spread": "1"})
    assert "spread is not a known setting" in refused(tmp_path, flags={"spread": "1"})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.toml", environ={})


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("http://h:1", EngineAddress("http://h:1")),
        ("http://h:1/", EngineAddress("http://h:1")),
        ("http://[::1]:1,dp-rank=2", EngineAddress("http://[::1]:1", 2)),
        ("http://h:1,role=both", EngineAddress("http://h:1", role="both")),
        (
            "http://h:1,events=tcp://h:2,replay=tcp://h:3,topic=t",
            EngineAddress("http://h:1", None, "tcp://h:2", "tcp://h:3", "t"),
        ),
    ],
)
def test_engines_as_the_flag_takes_them(text: str, engine: EngineAddress) -> None:
    assert parse_engine(text) == engine


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:1",
        "ftp://h",
        "http://",
        "http://h,x=1",
        "http://h,events",
        "http://h,dp-rank=x",
        "http://h:x",
        "http://h:1,role=p",
    ],
)
def test_an_invalid_engine_argument(text: str) -> None:
    with pytest.raises(ConfigError, match="engine"):
        parse_engine(text)


def test_retention_of_hybrid_engines_does_not_trouble_an_assumed_shadow() -> None:
    config = load(None, environ={}, models={"m": {"retention_interval": 128}}).config
    assert config.model("m").facts().retention_interval == 128
    Shadow(config.model("m").shadow_spec())


def test_faults_seen_only_while_building_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.policy = 'nope': expected one of kvatlas,"):
        load(None, environ={}, flags={"policy.policy": "nope"})
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="models: "):
        check(load(None, environ={}, models={"m": {"tokenizer": str(tmp_path)}}).config)


def test_defaults_hold_no_secret_and_pass_their_own_check() -> None:
    loaded = load(None, engines=(parse_engine("http://a:1"),), environ={})
    check(loaded.config)
    text = describe(loaded)
    for harmless in (
        "isolate_secret_file",
        "keys.secret_file",
        "key_",
        "keys.",
        "/var/run/secrets/",
    ):
        text = text.replace(harmless, "")
    assert not re.search(r"key|token=|secret|password", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("engines", "missing"),
    [(["http://a:1,role=prefill"], "decode"), (["http://a:1,role=decode", "http://b:1"], "prefill")],
)
def test_a_role_without_its_other_half_is_refused(engines: list[str], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"none has role={missing}"):
        load(environ={}, engines=tuple(parse_engine(text) for text in engines))


@pytest.mark.parametrize(
    "engines",
    [["http://a:1,role=both", "http://b:1,role=both"], ["http://a:1,role=prefill", "http://b:1,role=both"]],
)
def test_engines_for_both_are_either_half(engines: list[str]) -> None:
    loaded = load(environ={}, engines=tuple(parse_engine(text) for text in engines))
    assert [engine.role for engine in loaded.config.engines][1] == "both"


def test_the_other_role_may_be_discovered() -> None:
    flags = {"fleet.file.path": "engines.toml"}
    loaded = load(environ={}, engines=(parse_engine("http://a:1,role=prefill"),), flags=flags)
    assert loaded.config.engines[0].role == "prefill"


@pytest.mark.parametrize("key", ["lease_s=0", "leg_overhead_s=inf", "transfer_s_per_token=-1"])
def test_a_lease_without_rest_and_other_nonsense_is_refused(key: str) -> None:
    name, _, value = key.partition("=")
    with pytest.raises(ConfigError, match=name):
        load(environ={}, flags={f"pd.{name}": value})


ENGINE = EngineAddress("http://engine:8000")


def config(**sections: Any) -> Config:
    return Config(**{"engines": (ENGINE,), **sections})


def test_every_live_key_is_a_key() -> None:
    for key in LIVE:
        section, _, name = key.partition(".")
        value = getattr(Config(), section)
        assert not name or hasattr(value, name)


def test_the_same_again_is_no_change() -> None:
    change = changes(config(), config())
    assert (change.config, change.taken, change.waiting) == (config(), (), ())


def test_live_changes_are_applied_and_the_rest_is_named() -> None:
    wanted = config(
        server=ServerConfig(port=9000, log_level="debug"),
        models={"a": ModelConfig(mamba_cache_mode="align")},
        aliases={"name": "a"},
        proxy=ProxySettings(attempts_max=2),
        queue=QueueSettings(saturation_s=1.0),
        fleet=FleetSettings(poll_interval_s=1.0, file=FileSettings(path="/engines.toml")),
    )
    change = changes(config(), wanted)
    assert set(change.taken) == {
        "server.log_level",
        'models."a"',
        'aliases."name"',
        "proxy.attempts_max",
        "queue.saturation_s",
        "fleet.poll_interval_s",
    }
    assert set(change.waiting) == {"server.port", "fleet.file.path"}
    assert change.config.server == ServerConfig(log_level="debug")
    assert change.config.fleet == FleetSettings(poll_interval_s=1.0)
    assert change.config.aliases == wanted.aliases


def test_keys_are_neither_switched_on_nor_off(tmp_path: Path) -> None:
    without, one, other = config(), *(config(keys=KeySettings(file=name)) for name in ("a", "b"))
    assert changes(without, one).waiting == ("keys.file",)
    assert changes(one, without).waiting == ("keys.file",)
    assert changes(one, other).taken == ("keys.file",)
    secret = config(keys=KeySettings(file="a", secret_file="s"))
    assert changes(one, secret).waiting == changes(secret, one).waiting == ("keys.secret_file",)


@pytest.mark.parametrize(("share", "waiting"), [("blocks", ('models."a"',)), ("load", ())])
def test_models_of_a_shared_index_stay(share: Literal["blocks", "load"], waiting: tuple[str, ...]) -> None:
    shared = IndexSettings(url="redis://server", share=share)
    running, wanted = config(index=shared), config(index=shared, models={"a": ModelConfig()})
    assert changes(running, wanted).waiting == waiting
    other = IndexSettings(url="redis://server", share="load" if share == "blocks" else "blocks")
    assert changes(config(index=shared), config(index=other)).waiting == ("index.share",)


def test_a_change_that_contradicts_a_fixed_value_is_refused() -> None:
    running = config(admin=AdminSettings(enabled=True, token_file="tokens"))
    with pytest.raises(ConfigError, match=r"admin.enabled.*log_level"):
        changes(running, config(server=ServerConfig(log_level="error")))


def test_zero_is_a_value_where_the_documentation_says_what_it_means() -> None:
    config = load(
        None, environ={}, engines=(parse_engine("http://a:1"),), flags={"proxy.suspect_s": "0"}
    ).config
    check(config)
    assert config.proxy.suspect_s == 0.0
