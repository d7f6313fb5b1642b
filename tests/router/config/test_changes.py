"""What a running router takes of another configuration, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.admission.admission_queue import QueueSettings
from router.admission.key_file import KeySettings
from router.api.admin_auth import AdminSettings
from router.config.errors import ConfigError
from router.config.load import LIVE, changes
from router.config.schema import Config, ModelConfig, ServerConfig
from router.fleet.engines import EngineAddress
from router.fleet.settings import FileSettings, FleetSettings
from router.proxy.settings import ProxySettings
from router.replication.settings import IndexSettings

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


def test_what_can_be_taken_is_and_the_rest_is_named() -> None:
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


def test_models_of_a_shared_index_stay() -> None:
    shared = IndexSettings(url="redis://server")
    running, wanted = config(index=shared), config(index=shared, models={"a": ModelConfig()})
    assert changes(running, wanted).waiting == ('models."a"',)


def test_what_does_not_go_with_what_stays_is_refused() -> None:
    running = config(admin=AdminSettings(enabled=True, token_file="tokens"))
    with pytest.raises(ConfigError, match=r"admin.enabled.*log_level"):
        changes(running, config(server=ServerConfig(log_level="error")))
