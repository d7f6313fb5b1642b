"""The configuration that the chart renders is what the real router reads: nothing drifts between the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chart import MINIMAL, Rendered
from test_rendered import CASES, EVERYTHING

from router.cli import app
from router.config import load


def _load(rendered: Rendered, directory: Path) -> Any:
    """Read the rendered file with the real parser; what is mounted in a pod does not exist here."""
    file = directory / "kvatlas.toml"
    file.write_text(rendered.toml)
    return load(file, environ={}).config


@pytest.mark.parametrize("name", CASES)
def test_the_router_reads_it(name: str, tmp_path: Path) -> None:
    config = _load(Rendered(CASES[name]), tmp_path)
    assert config.server.port == 8000
    assert config.server.host == "0.0.0.0"


def test_every_value_arrives(tmp_path: Path) -> None:
    values = {
        **EVERYTHING,
        "policy": "exact",
        "exposeDecision": True,
        "warmUpSeconds": 12,
        "config": {"proxy": {"first_byte_timeout_s": 42}, "policy": {"beta": 0.5}},
    }
    config = _load(Rendered(values), tmp_path)
    assert config.policy.policy == "exact"
    assert config.policy.beta == 0.5
    assert config.proxy.first_byte_timeout_s == 42
    assert config.server.expose_decision is True
    assert config.fleet.warm_up_s_max == 12
    assert config.models["*"].tokenizer == "/models/models/a/b"
    assert config.models["*"].mamba_cache_mode == "align"
    assert config.models["other.model"].tokenizer == "/models/models"
    assert config.models["other.model"].lora_paths == {"x": "/y"}
    assert [engine.dp_rank for engine in config.engines] == [1]


def test_what_the_values_say_config_may_overrule(tmp_path: Path) -> None:
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
