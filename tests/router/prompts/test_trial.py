"""Files of others are tried in a process of their own: what is bad ends that process, and names the file."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.prompts.hub import HubLimits, TokenizerProblem
from kvatlas.router.prompts.settings import ModelPrompts
from kvatlas.router.prompts.tokenizer_source import TokenizerSource
from kvatlas.router.prompts.trial import FILE_BYTES_MAX, TrialRequest, Trials, check_sizes
from tests.support.stand_in_hub import repository_of, stand_in_hub
from tests.support.waiting import until

pytestmark = pytest.mark.real  # processes take real time

LIMITS = HubLimits(downloads=True, endpoint="", bytes_max=64 << 20, timeout_s=30.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "model"))


def of(folder: Path, cpu_s: int = 20) -> TrialRequest:
    return TrialRequest(None, LIMITS, ModelPrompts(tokenizer_dir=str(folder)), fast=False, cpu_s=cpu_s)


async def problem_of(request: TrialRequest) -> TokenizerProblem:
    with pytest.raises(TokenizerProblem) as caught:
        await Trials().run(request, "the model")
    return caught.value


OTHERS: set[str] = set()
"""Servers that other tests of this process share."""


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(children())


def children() -> set[str]:
    """Processes that any thread of this one began, without ``OTHERS``."""
    found = {name for own in Path("/proc/self/task").glob("*/children") for name in own.read_text().split()}
    return found - OTHERS


async def test_good_files_pass_and_leave_nothing_behind(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert (await Trials().run(of(folder), "the model")).folder == folder
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert not children()


@pytest.mark.parametrize("content", ["{" * 100_000, "[" + "1," * 50 + "1]"], ids=["no JSON", "no tokenizer"])
async def test_a_file_that_cannot_be_loaded_is_named(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    problem = await problem_of(of(folder, cpu_s=8))
    assert problem.reason == "unusable"
    assert "tokenizer.json" in str(problem)
    assert "--tokenizer" in problem.remedy
    assert not children()


async def test_a_template_that_never_ends_holds_no_trial(folder: Path) -> None:
    """Rendering is bounded; its chats are left to the engines."""
    (folder / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"
    )
    assert (await Trials().run(of(folder), "the model")).folder == folder


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("kill -ABRT $$", "ended the process (SIGABRT)"),
        ("kill -SEGV $$", "ended the process (SIGSEGV)"),
        ("kill -XCPU $$", "more than 20 s of CPU"),
        ("exit 3", "status 3"),
    ],
)
async def test_a_process_that_ends_names_the_file_that_it_was_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str, says: str
) -> None:
    begin = subprocess.Popen
    script = f"""printf '{{"at":"files of the hub"}}\n{{"at":"tokenizer.json"}}\n'; {end}"""

    def ending(_: object, **named: Any) -> subprocess.Popen[bytes]:
        return begin(["sh", "-c", script], **named)

    monkeypatch.setattr("kvatlas.router.prompts.trial.subprocess.Popen", ending)
    problem = await problem_of(of(folder))
    assert problem.reason == "unusable"
    assert "tokenizer.json" in str(problem)
    assert says in str(problem)


def test_large_files_are_not_loaded(folder: Path) -> None:
    for name, most in {**FILE_BYTES_MAX, "config.json": 16 << 20, "chat_template.jinja": 1 << 20}.items():
        with (folder / name).open("ab") as file:
            file.truncate(most + 1)
        with pytest.raises(TokenizerProblem) as caught:
            check_sizes(folder)
        assert caught.value.reason == "too_large"
        assert name in str(caught.value)
        (folder / name).unlink()


@pytest.mark.long
async def test_an_answer_of_the_hub_that_grows_when_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with stand_in_hub() as hub:
        hub.repositories["org/model"] = repository_of(Path(DEMO_TOKENIZER_DIR))
        hub.unpacks_to = 2 << 30
        source = TokenizerSource("repository", "org/model")
        limits = LIMITS._replace(endpoint=hub.url)
        problem = await problem_of(TrialRequest(source, limits, ModelPrompts(), fast=False))
    assert problem.reason in {"too_large", "unreachable"}
    assert "org/model" in str(problem)


async def test_a_trial_that_is_not_wanted_any_more_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def waiting(_: object, **named: Any) -> subprocess.Popen[bytes]:
        begun.append(begin(["sleep", "60"], **named))
        return begun[-1]

    monkeypatch.setattr("kvatlas.router.prompts.trial.subprocess.Popen", waiting)
    task = asyncio.create_task(Trials().run(of(folder), "the model"))
    await until(lambda: bool(begun), "the child runs")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: begun[0].poll() is not None, "the child is gone")
    assert begun[0].returncode < 0
