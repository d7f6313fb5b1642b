"""The container's health check finds the port of whatever process 1 runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas.router import health_check
from kvatlas.router.config.schema import OPS_PORT, ServerConfig
from tests.support.whole_router import configure, routing, running

OPS = f"http://127.0.0.1:{OPS_PORT}/health"


@pytest.mark.parametrize(
    ("words", "environ", "asked"),
    [
        (["kvatlas", "serve"], {}, [OPS, f"http://127.0.0.1:{ServerConfig().port}/health"]),
        (["python", "kvatlas", "epp", "--listen", "0.0.0.0:9002"], {}, [OPS]),
        (["kvatlas", "serve", "--port", "80"], {}, [OPS, "http://127.0.0.1:80/health"]),
        (["kvatlas", "serve", "--ops-port=off", "--host", "::"], {}, ["http://[::1]:8000/health"]),
        (["kvatlas", "serve", "--set", "server.ops_port=7"], {}, ["http://127.0.0.1:7/health"]),
        (["kvatlas", "epp"], {"KVATLAS_SERVER_OPS_PORT": "77"}, ["http://127.0.0.1:77/health"]),
        (
            ["kvatlas", "serve", "--ops-port", "off"],
            {"KVATLAS_SERVER_TLS_CERT_FILE": "/c", "KVATLAS_SERVER_HOST": "10.0.0.1"},
            ["https://10.0.0.1:8000/health"],
        ),
    ],
)
def test_ports_by_arguments_and_environment(
    words: list[str], environ: dict[str, str], asked: list[str]
) -> None:
    assert health_check.urls(words, environ)[: len(asked)] == asked


def test_ports_by_the_configuration_file_which_flags_override(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text('[server]\nport = 8443\nops_port = 9100\ntls_cert_file = "/c"\n', encoding="utf-8")
    words = ["kvatlas", "serve", "--config", str(file), "--ops-port", "9200"]
    assert health_check.urls(words, {}) == ["http://127.0.0.1:9200/health", "https://127.0.0.1:8443/health"]
    file.write_text("no toml", encoding="utf-8")
    assert health_check.urls(["kvatlas", "serve", f"--config={file}"], {})[0] == OPS


@pytest.mark.real  # urllib opens sockets of the kernel
async def test_a_running_router_is_healthy_and_a_closed_port_is_not() -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        assert await asyncio.to_thread(health_check._answers, f"{rig.ops_url}/health")
        assert await asyncio.to_thread(health_check._answers, f"{rig.url}/health")
        url = rig.url
    assert not await asyncio.to_thread(health_check._answers, f"{url}/health")


def test_the_image_runs_a_check_that_exists_and_imports_only_the_standard_library() -> None:
    dockerfile = (Path(__file__).parents[3] / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(r'HEALTHCHECK.*?"-m", "([\w.]+)"', dockerfile, re.DOTALL)
    assert found is not None
    script = (
        f"import sys; before = set(sys.modules); import {found[1]} as check; check.main; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - sys.stdlib_module_names - {'kvatlas'}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
