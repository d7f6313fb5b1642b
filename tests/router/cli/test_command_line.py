"""The ``kvatlas`` command as a process of its own: statuses, messages, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from tests.support.examples import some
from tests.support.paths import ROOT

KVATLAS = [sys.executable, "-m", "kvatlas"]


def started(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVATLAS, *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_the_commands() -> None:
    told = started("--help")
    assert told.returncode == 0
    for command in ("serve", "verify", "engine", "demo"):
        assert command in told.stdout


def loads_none_of(modules: set[str], code: str) -> None:
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys\nloaded = {modules} & set(sys.modules)\nassert not loaded, loaded",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvatlas.router.__main__ import main\nsys.argv = ['kvatlas', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    loads_none_of({"numpy", "tokenizers", "fastapi", "uvicorn", "aiohttp", "zmq.asyncio"}, code)


@pytest.mark.process
def test_a_router_loads_nothing_that_only_some_need() -> None:
    loads_none_of(
        {"redis", "openai_harmony", "mistral_common", "dns", "lightkube", "aiohttp"},
        "import kvatlas.router.serve",
    )


@pytest.mark.process
def test_only_the_process_that_serves_the_ops_port_loads_fastapi() -> None:
    made = (
        "from kvatlas.router.app import Router\nfrom kvatlas.router.config.schema import Config\n"
        "router = Router(Config())\n"
    )
    loads_none_of({"fastapi", "pydantic", "starlette"}, f"import kvatlas.router.serve\n{made}")
    with pytest.raises(AssertionError, match="fastapi"):
        loads_none_of({"fastapi", "pydantic"}, f"{made}router.load_ops()")


@pytest.mark.process
def test_the_index_loads_only_what_vllm_has_too() -> None:
    """tests/vllm/drive_random.py predicts inside vLLM's environment, which has not all of the router's."""
    loads_none_of(
        {"structlog", "aiohttp"},
        "import kvatlas.router.index.model\nimport kvatlas.router.tools.trace_verification",
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve"], "no engine configured: give --engine URL"),
        (["serve", "--engine", "nonsense"], "engine 'nonsense': expected http://HOST:PORT"),
        (["serve", "--engine", "http://h", "--set", "policy.spread"], "expected SECTION.KEY=VALUE"),
        (["serve", "--engine", "http://h", "--set", "policy.betta=1"], "policy.betta is not a known setting"),
        (
            ["serve", "--engine", "http://h", "--policy", "nope"],
            "policy.policy = 'nope': expected one of kvatlas",
        ),
        (["serve", "--engine", "http://h", "--tokenizer", "/nowhere"], "models.*.tokenizer: /nowhere"),
        (["serve", "--engine", "http://h", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "--engine", "http://h", "--port", "x"], "--port"),
        (["serve", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["demo", "--seconds", "x"], "--seconds"),
        (["demo", "--engines", "0"], "--engines: 0 is not 1 to 64"),
        (["demo", "--seconds", "-1"], "--seconds: -1.0 is not above 0 and at most 86400"),
        (["demo", "--seconds", "nan"], "--seconds: nan is not above 0 and at most 86400"),
        (["demo", "--port", "70000"], "--port: 70000 is not a port number, 0 to 65535"),
        (["engine", "--set", "nonsense=1"], "expected KEY=VALUE with a KEY of"),
    ],
)
def test_bad_arguments_end_with_status_2_and_a_reason(
    arguments: list[str], told: str, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = kvatlas(*arguments)
    assert ended.returncode == 2, ended
    assert told in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


def test_print_config_shows_where_values_come_from(
    tmp_path: Path, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[policy]\nengine_priority = 0.25\n", encoding="utf-8")
    told = kvatlas(
        "serve",
        "--print-config",
        "--config",
        str(file),
        "--set",
        "policy.spread=0.5",
        "--engine",
        "http://h:1",
        KVATLAS_INDEX_LEASE_S="4.5",
    )
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert f"policy.engine_priority = 0.25  # file {file}" in lines
    assert "policy.spread = 0.5  # flag" in lines
    assert "index.lease_s = 4.5  # environment KVATLAS_INDEX_LEASE_S" in lines
    assert 'engines[0].base_url = "http://h:1"  # flag' in lines
    assert "server.port = 8000  # default" in lines


def test_check_config_checks_and_stops(kvatlas: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    told = kvatlas("serve", "--check-config", "--engine", "http://h", "--tokenizer", str(DEMO_TOKENIZER_DIR))
    assert (told.returncode, told.stdout) == (0, "configuration ok\n")
    files = ("--set", "server.tls_cert_file=/nowhere.crt", "--set", "server.tls_key_file=/nowhere.key")
    told = kvatlas("serve", "--check-config", "--engine", "http://h", *files)
    assert (told.returncode, told.stdout) == (2, "")
    assert "server.tls_cert_file" in told.stderr


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], IO[str], str]]:
    """A router in a process that listens: itself, its log, its URL."""
    words = ["serve", "--port", "0", "--engine", "http://127.0.0.1:9", "--set", "server.log_format=json"]
    process = subprocess.Popen([*KVATLAS, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr as log:
        said = {}
        while said.get("event") != "listening":
            said = json.loads(log.readline())
        yield process, log, said["url"]


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], 2))
def test_serve_logs_its_address_and_ends_cleanly(number: int) -> None:
    with serving() as (process, log, url):
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer) == {"status": "ok"}
        process.send_signal(number)
        rest = log.read()
        assert process.wait() == 0
        assert "Traceback" not in rest


@pytest.mark.process
def test_a_router_with_a_closed_log_pipe_ends_at_sigterm() -> None:
    router = subprocess.Popen(
        [*KVATLAS, "serve", "--port", "0", "--engine", "http://127.0.0.1:9"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert router.stderr is not None
    with router:
        while "listening" not in router.stderr.readline():
            pass
        router.stderr.close()
        router.send_signal(signal.SIGTERM)
        assert router.wait() in {0, 120}  # 120: Python's own word for a standard stream it could not flush


@pytest.mark.process
def test_a_port_in_use_is_reported_with_status_1() -> None:
    with serving() as (first, _, url):
        port = url.rpartition(":")[2]
        second = started("serve", "--port", port, "--ops-port", "0", "--engine", "http://127.0.0.1:9")
        assert second.returncode == 1
        (line,) = [line for line in second.stderr.splitlines() if "already in use" in line]
        assert f"server.port: cannot listen on 127.0.0.1:{port}: address already in use" in line
        assert "Errno" not in second.stderr
        assert "Traceback" not in second.stderr
        first.send_signal(signal.SIGTERM)
