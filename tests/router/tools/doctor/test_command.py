"""``kvatlas doctor`` as a process: arguments, statuses, table and JSON."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from tests.support.paths import ROOT
from tests.support.whole_router import running

DOWN = "http://127.0.0.1:9"


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvatlas", "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to check: give --engine URL"),
        (["--engine", "nonsense"], "expected http://HOST:PORT"),
        (["--router", "nonsense"], "--router 'nonsense'"),
        (["--engine", DOWN, "--seconds", "-1"], "--seconds: -1.0"),
        (["--engine", DOWN, "--seconds", "nan"], "--seconds: nan"),
        (["--engine", DOWN, "--timeout", "0"], "--timeout: 0.0"),
        (["--engine", DOWN, "--tokenizer", "/nowhere"], "models.*.tokenizer: /nowhere"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--config", "{ca}"], "fleet.ca_file, client_cert_file or client_key_file: /nowhere.crt"),
        (["--engine", DOWN, "--nonsense"], "--nonsense"),
    ],
)
def test_bad_arguments_end_with_status_2(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    ca = tmp_path / "ca.toml"
    ca.write_text('[fleet]\nca_file = "/nowhere.crt"\n[[engines]]\nbase_url = "https://127.0.0.1:9"\n')
    ended = kvatlas("doctor", *(word.format(ca=ca) for word in arguments))
    assert ended.returncode == 2, ended
    assert told in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.process
def test_a_tokenizer_that_cannot_be_used_ends_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    ended = doctor("--engine", DOWN, "--tokenizer", str(tmp_path))
    assert ended.returncode == 2, ended
    assert "--tokenizer" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.process
def test_an_engine_that_is_down_ends_with_status_1_and_a_remedy() -> None:
    ended = doctor("--engine", DOWN)
    assert ended.returncode == 1, ended
    for words in ("error", "http.health", "cannot connect", "cause: ", "remedy: "):
        assert words in ended.stdout
    ended = doctor("--engine", DOWN, "--json")
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert report["worst"] == "error"
    assert report["counts"]["error"] == sum(f["severity"] == "error" for f in report["findings"])
    assert {"check", "severity", "subject", "seen", "cause", "remedy", "since_s"} == set(
        report["findings"][0]
    )


@pytest.mark.real  # a process
async def test_a_healthy_engine_ends_with_status_0() -> None:
    async with running({}) as (engine,):
        arguments = ("--engine", engine.base_url, "--tokenizer", str(DEMO_TOKENIZER_DIR), "--probe")
        ended = await asyncio.to_thread(doctor, *arguments, "--seconds", "0", "--json")
        assert ended.returncode == 0, ended
        assert ended.stderr == ""
        assert json.loads(ended.stdout)["worst"] in {"ok", "info"}
