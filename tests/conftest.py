"""What all tests share: the number of examples, and ``kvatlas`` called in process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.support.examples import PROFILE, load_profile

load_profile()


def pytest_report_header() -> str:
    return f"hypothesis examples: {PROFILE}"


@pytest.fixture
def kvatlas(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``kvatlas(*words, **environ)`` in this process, for what ends by itself: its status and output."""
    from router.__main__ import run  # noqa: PLC0415 - where vLLM runs the connectors' tests there is no router

    def call(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        for name, value in {"NO_COLOR": "1", "COLUMNS": "200", **environ}.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = run(words)
        told = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, told.out, told.err)

    return call
