"""Files of others are tried in a process of their own: what is bad ends that process, and names the file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from publisher.simulator.settings import DEMO_TOKENIZER_DIR
from router.prompts.hub import HubLimits, TokenizerProblem, TokenizerSource
from router.prompts.settings import ModelPrompts
from router.prompts.trial import FILE_BYTES_MAX, TrialRequest, Trials, check_sizes
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


def children() -> set[str]:
    """Processes that any thread of this one began."""
    return {name for own in Path("/proc/self/task").glob("*/children") for name in own.read_text().split()}


async def test_good_files_pass_and_leave_nothing_behind(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert (await Trials().run(of(folder), "the model")).folder == folder
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert not children()


DOUBLES = "{% set s = namespace(t='ab') %}" + "{% set s.t = s.t ~ s.t %}" * 60
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = b %}{% endfor %}{% endfor %}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "chat_template.jinja",
            "{% set s = namespace(t='ab') %}" + "{% set s.t = s.t ~ s.t %}" * 60,
            "template",
        ),
        ("chat_template.jinja", LOOPS, "template"),
        ("tokenizer.json", "{" * 100_000, "tokenizer.json"),
        ("tokenizer.json", "[" + "1," * 50 + "1]", "tokenizer.json"),
    ],
    ids=["a text that doubles", "endless loops", "no JSON", "no tokenizer"],
)
async def test_what_would_end_or_hold_the_router_ends_the_trial(
    folder: Path, name: str, content: str, says: str
) -> None:
    if name == "chat_template.jinja":
        config = folder / "tokenizer_config.json"
        known = json.loads(config.read_text())
        known.pop("chat_template", None)
        config.write_text(json.dumps(known))
    (folder / name).write_text(content)
    problem = await problem_of(of(folder, cpu_s=8))
    assert problem.reason in {"unusable", "too_large"}
    assert says in str(problem)
    assert "--tokenizer" in problem.remedy
    assert not children()


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

    monkeypatch.setattr("router.prompts.trial.subprocess.Popen", waiting)
    task = asyncio.create_task(Trials().run(of(folder), "the model"))
    await until(lambda: bool(begun), "the child runs")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: begun[0].poll() is not None, "the child is gone")
    assert begun[0].returncode < 0
