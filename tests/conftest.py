"""What all tests share: the number of examples, the collector's rest, and ``kvatlas`` called in process."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.support.examples import PROFILE, load_profile

load_profile()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests stay in memory until the end: the collector need not look at them ever again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_report_header() -> str:
    return f"hypothesis examples: {PROFILE}"


@pytest.fixture(autouse=True)
def log_as_configured_before() -> Iterator[None]:
    """A command that a test runs in this process configures the log; the next test finds it as it was."""
    yield
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()


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
