"""Files of a repository: which are fetched, within which bounds, and what every failure is called."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.prompts.hub import HubLimits, TokenizerProblem, fetch
from kvatlas.router.prompts.model_dir import load_model_dir
from kvatlas.router.prompts.tokenizer_source import TokenizerSource, parse_source
from tests.support.stand_in_hub import Repository, StandInHub, repository_of, stand_in_hub

NAME = "org/model"
SOURCE = TokenizerSource("repository", NAME)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with stand_in_hub() as served:
        served.repositories[NAME] = repository_of(Path(DEMO_TOKENIZER_DIR))
        yield served


def limits(hub: StandInHub, **changes: Any) -> HubLimits:
    return HubLimits(downloads=True, endpoint=hub.url, bytes_max=1 << 26, timeout_s=30.0)._replace(**changes)


def problem(source: TokenizerSource, given: HubLimits) -> TokenizerProblem:
    with pytest.raises(TokenizerProblem) as found:
        fetch(source, given)
    assert found.value.remedy
    return found.value


def test_only_files_for_rendering_are_fetched(hub: StandInHub) -> None:
    repository = hub.repositories[NAME]
    repository.files["additional_chat_templates/tool_use.jinja"] = b"{{ messages }}"
    found = fetch(SOURCE, limits(hub))
    assert found.commit == repository.commit
    assert not hub.fetched() & {"model.safetensors", "README.md", "modeling.py"}
    ours, theirs = load_model_dir(found.folder), load_model_dir(DEMO_TOKENIZER_DIR)
    assert ours.tokenizer.encode("Hello").ids == theirs.tokenizer.encode("Hello").ids
    assert ours.templates["tool_use"] == "{{ messages }}"
    sent = len([line for line in hub.requests if line.startswith("GET ") and "/resolve/" in line])
    fetch(SOURCE, limits(hub))
    again = len([line for line in hub.requests if line.startswith("GET ") and "/resolve/" in line])
    assert sent == again, "the rest is in the cache"


def test_a_revision_and_a_token(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    commit = hub.repositories[NAME].commit
    assert fetch(parse_source(f"{NAME}@{commit}"), limits(hub)).commit == commit
    assert set(hub.tokens) == {"Bearer hf_secret"}
    found = problem(parse_source(f"{NAME}@v7"), limits(hub))
    assert (found.reason, "v7" in str(found)) == ("not_found", True)


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        ((401, "GatedRepo"), "gated", "HF_TOKEN"),
        ((403, "GatedRepo"), "gated", "HF_TOKEN"),
        ((401, "RepoNotFound"), "not_found", "HF_TOKEN"),
        ((404, "RepoNotFound"), "not_found", "--tokenizer"),
        ((500, ""), "unreachable", "prompts.hub_endpoint"),
    ],
)
def test_refusals_of_the_hub(hub: StandInHub, error: tuple[int, str], reason: str, remedy: str) -> None:
    hub.repositories[NAME].error = error
    found = problem(SOURCE, limits(hub))
    assert found.reason == reason
    assert remedy in found.remedy


def test_too_many_requests(hub: StandInHub) -> None:
    hub.repositories[NAME].error = (429, "")
    found = problem(SOURCE, limits(hub))
    assert (found.reason, found.may_pass) == ("rate_limited", True)


def test_a_hub_that_is_away_leaves_what_the_cache_has(hub: StandInHub) -> None:
    away = "http://127.0.0.1:9"
    assert problem(SOURCE, limits(hub, endpoint=away)).reason == "unreachable"
    fetched = fetch(SOURCE, limits(hub))
    assert fetch(SOURCE, limits(hub, endpoint=away)) == fetched
    assert fetch(SOURCE, limits(hub, downloads=False)) == fetched


@pytest.mark.parametrize("setting", [True, False])
def test_without_downloads_nothing_is_asked(
    hub: StandInHub, setting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not setting)
    found = problem(SOURCE, limits(hub, downloads=not setting))
    assert found.reason == "offline"
    assert ("hub_downloads" if setting else "HF_HUB_OFFLINE") in str(found)
    assert not hub.requests


@pytest.mark.long  # the package asks again five times, and waits in between
def test_a_file_that_comes_short(hub: StandInHub) -> None:
    hub.repositories[NAME].truncated["tokenizer.json"] = 100
    found = problem(SOURCE, limits(hub))
    assert (found.reason, found.may_pass) == ("incomplete", True)
    del hub.repositories[NAME].truncated["tokenizer.json"]
    fetch(SOURCE, limits(hub))


def test_a_full_disk(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    found = problem(SOURCE, limits(hub))
    assert (found.reason, found.may_pass) == ("disk", True)
    assert "HF_HOME" in found.remedy


def test_a_cache_that_cannot_be_written(hub: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert problem(SOURCE, limits(hub)).reason in {"disk", "incomplete"}


def test_sizes_are_bounded_as_announced_and_as_they_come(hub: StandInHub) -> None:
    assert problem(SOURCE, limits(hub, bytes_max=1000)).reason == "too_large"
    assert not hub.fetched()
    hub.repositories[NAME].sizes = dict.fromkeys(hub.repositories[NAME].files, 1)
    assert problem(SOURCE, limits(hub, bytes_max=1000)).reason == "too_large"


def test_time_is_bounded(hub: StandInHub) -> None:
    assert problem(SOURCE, limits(hub, timeout_s=-1.0)).reason == "too_slow"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": b"{}"}, "no_tokenizer"),
        ({"tokenizer_config.json": b"{}", "tokenization_own.py": b"raise SystemExit"}, "remote_code"),
        ({"tokenizer.model": b"sentencepiece"}, "no_tokenizer"),
    ],
)
def test_repositories_that_cannot_be_used(hub: StandInHub, files: dict[str, bytes], reason: str) -> None:
    hub.repositories[NAME] = Repository(files)
    found = problem(SOURCE, limits(hub))
    assert (found.reason, found.may_pass) == (reason, False)
    assert not hub.fetched()


@pytest.mark.parametrize(
    ("weights", "kept"),
    [("consolidated-00001-of-2.safetensors", "tekken.json"), ("model-00001.safetensors", "tokenizer.json")],
)
def test_of_two_tokenizers_that_of_the_weights(hub: StandInHub, weights: str, kept: str) -> None:
    files = {**repository_of(Path(DEMO_TOKENIZER_DIR)).files, "tekken.json": b"{}", weights: b"x"}
    if weights.startswith("consolidated"):
        files.pop("model.safetensors")
    hub.repositories[NAME] = Repository(files)
    fetch(SOURCE, limits(hub))
    assert hub.fetched() & {"tekken.json", "tokenizer.json"} == {kept}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("auto", "auto"),
        ("off", "off"),
        ("Qwen/Qwen3-8B", "repository"),
        ("Qwen/Qwen3-8B@refs/pr/1", "repository"),
        ("/models/x", "directory"),
        ("./x", "directory"),
        ("org/name/more", "directory"),
        ("org/../name", "directory"),
        ("gpt2", "directory"),
        ("org/", "directory"),
        ("", "directory"),
    ],
)
def test_meanings_of_the_tokenizer_setting(text: str, kind: str) -> None:
    assert parse_source(text).kind == kind
