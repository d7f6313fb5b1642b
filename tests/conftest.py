"""Shared by all tests: examples, the collector's rest, an end for what hangs, ``kvatlas`` in process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType

import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.support.examples import PROFILE, load_profile
from tests.support.hangs import Watchdog, fail_instead_of_waiting
from tests.support.paths import ROOT
from tests.support.waiting import Chosen, patience, run
from tests.world import seams

# The size of some terminal, which readline leaves to the workers of pytest-xdist.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
load_profile()
seams.install()
fail_instead_of_waiting()
_WATCHDOG = pytest.StashKey[Watchdog]()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests stay in memory until the end: the collector need not look at them ever again."""
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000)  # at 700 allocations, CPython's default, a twentieth of all time


def _import_share(config: pytest.Config) -> None:
    """Workers of pytest-xdist import tests in the same order: where none is compiled yet, each would compile
    all of them (five seconds) beside the others. Each begins with a share of its own."""
    if not hasattr(config, "workerinput") or sys.dont_write_bytecode:
        return
    worker, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    left_out = [Path(path).resolve() for path in config.getoption("ignore") or ()]
    found = [path for arg in config.args for path in Path(arg).resolve().rglob("test_*.py")]
    for path in sorted(set(found))[worker::count]:
        if not any(path.is_relative_to(out) for out in left_out):
            # What is wrong with one shows where it is collected; some skip themselves.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a library that takes more than a second to import come first, which is in one worker."""
    items.sort(key=lambda item: "anthropic" not in getattr(item, "fixturenames", ()))


def pytest_report_header() -> str:
    return f"hypothesis examples: {PROFILE}"


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """A crowded machine is given more time; what the time-out cannot interrupt is ended."""
    settings = settings._replace(timeout=settings.timeout * patience())
    stash = item.config.stash
    if _WATCHDOG not in stash:
        stash[_WATCHDOG] = Watchdog(stash[fault_handler_stderr_fd_key])
    stash[_WATCHDOG].begin(item.nodeid, settings.timeout)
    return pytest_timeout.pytest_timeout_set_timer(item, settings)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    """The test is over."""
    if _WATCHDOG in item.config.stash:
        item.config.stash[_WATCHDOG].end()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Threads that never end keep no process that has run its tests. A worker of pytest-xdist has to wait for
    the others, and is ended by the process that started it."""
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(60.0, exit=True, file=sys.__stderr__)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that use ``waiting.run`` run on virtual time, unless they or their module are marked."""
    Chosen.real = any(item.get_closest_marker(name) for name in ("real", "process", "envoy", "vllm"))
    Chosen.seed = item.config.getoption("randomly_seed", 1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An ``async def`` test is a coroutine for ``waiting.run``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A command that a test runs in this process configures the log; the next test finds it as it was."""
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()


@pytest.fixture
def kvatlas(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``kvatlas(*words, **environ)`` in this process, for what ends by itself: its status and output."""
    from kvatlas.router.__main__ import run  # noqa: PLC0415 - where vLLM runs the connectors' tests there is no router

    def call(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        for name, value in {"NO_COLOR": "1", "COLUMNS": "200", **environ}.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = run(words)
        told = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, told.out, told.err)

    return call


@pytest.fixture
def anthropic() -> ModuleType:
    """The client library, imported by the tests that use it."""
    import anthropic as library  # noqa: PLC0415

    return library
