"""A router whose engines name what they serve: nothing configured, prompts read here once that is proven."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.prompts.parity import PROBES
from kvatlas.router.prompts.settings import ANY_MODEL, PromptSettings
from kvatlas.router.prompts.tokenizer_finder import ModelOrigin
from tests.support.examples import some
from tests.support.front import Front, fronting
from tests.support.stand_in_hub import StandInHub, repository_of, stand_in_hub
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

pytestmark = pytest.mark.real  # threads of the hub's library, and a process for each trial of a tokenizer

NAME = "org/model"
NAMED = {"root": NAME}
LOCAL = {"root": str(DEMO_TOKENIZER_DIR)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))  # of the process that fetches
    monkeypatch.setattr("kvatlas.router.prompts.tokenizer_finder.RETRY_S", 0.2)
    with stand_in_hub() as served:
        served.repositories[NAME] = repository_of(Path(DEMO_TOKENIZER_DIR))
        yield served


def settings(hub: StandInHub | None) -> PromptSettings:
    return PromptSettings(hub_endpoint="http://127.0.0.1:9" if hub is None else hub.url)


def auto(
    *engines: Any, hub: StandInHub | None = None, tokenizer: str | None = None, **changes: Any
) -> Config:
    models = {} if tokenizer is None else {ANY_MODEL: ModelConfig(tokenizer=tokenizer)}
    return configure(*engines, models=models, prompts=settings(hub, **changes))


async def origin(rig: Rig, how: str, reason: str = "") -> ModelOrigin:
    """How the model's prompts are read, once that is so."""

    def found() -> bool:
        one = rig.router.finder.origins().get(MODEL)
        return one is not None and (one.how, one.reason) == (how, reason)

    await until(found, lambda: f"{how} {reason}: {rig.router.finder.origins()}")
    return rig.router.finder.origins()[MODEL]


def other_tokenizer(folder: Path) -> Path:
    shutil.copytree(DEMO_TOKENIZER_DIR, folder)
    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["model"]["merges"] = fields["model"]["merges"][:1000]
    file.write_text(json.dumps(fields))
    return folder


def questions(front: Front) -> int:
    """How often the engine was asked for a prompt's tokens."""
    return sum(path.endswith(("/tokenize", "/render")) for path, _ in front.seen)


def odd_template(folder: Path) -> Path:
    """Other tokens for one chat, which is no probe."""
    shutil.copytree(DEMO_TOKENIZER_DIR, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if messages[0].content == 'Odd' %}other{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("root", some(["repository", "directory"], 2))
async def test_an_engine_is_all_that_is_given(hub: StandInHub, root: str) -> None:
    named = LOCAL if root == "directory" else NAMED
    async with running(named) as engines, routing(auto(*engines, hub=hub)) as rig:
        one = await origin(rig, "here")
        assert one.source.startswith(named["root"])
        for _ in range(2):
            await rig.chat(TEXT * 30)
            await rig.caught_up(*engines)
        assert rig.router.reader.stats.reads["chat", "local"] == 2
        assert rig.router.reader.stats.tokenizers_found == 1
        assert rig.outcomes("exact") == 2
        _, ready = await rig.ask("GET", "/ready")
        assert ready["prompts"][MODEL]["how"] == "here"
        assert ready["prompts"][MODEL]["source"] == one.source


@pytest.mark.process
async def test_prompts_are_read_meanwhile_and_the_fetch_goes_on(hub: StandInHub) -> None:
    hub.hold.clear()
    async with running(NAMED) as engines, routing(auto(*engines, hub=hub)) as rig:
        await origin(rig, "engine", "looking")
        await rig.chat(TEXT)
        assert rig.router.reader.stats.reads["chat", "engine"] == 1
        hub.hold.set()
        await origin(rig, "here")
        await rig.chat(TEXT)
        assert rig.router.reader.stats.reads["chat", "local"] == 1


@pytest.mark.process
@pytest.mark.parametrize("tokenizer", some([f"{NAME}@main", NAME], 2))
async def test_a_repository_may_be_configured(hub: StandInHub, tokenizer: str) -> None:
    async with running({}) as engines, routing(auto(*engines, hub=hub, tokenizer=tokenizer)) as rig:
        assert (await origin(rig, "here")).source.startswith(f"{NAME}@")


async def test_switched_off_engines_are_asked(hub: StandInHub) -> None:
    async with running(NAMED) as engines, routing(auto(*engines, hub=hub, tokenizer="off")) as rig:
        await origin(rig, "engine", "off")
        await rig.chat(TEXT)
        assert rig.router.reader.stats.reads["chat", "engine"] == 1
        assert not hub.requests


FAILURES = {"gated": (401, "GatedRepo"), "not_found": (404, "RepoNotFound"), "unreachable": (503, "")}


@pytest.mark.process
@pytest.mark.parametrize("reason", some(FAILURES, 3))
async def test_a_failure_is_shown_and_mended_while_the_router_serves(hub: StandInHub, reason: str) -> None:
    hub.repositories[NAME].error = FAILURES[reason]
    async with running(NAMED) as engines, routing(auto(*engines, hub=hub)) as rig:
        one = await origin(rig, "engine", reason)
        assert NAME in one.problem
        assert one.remedy
        await rig.chat(TEXT)
        stats = rig.router.reader.stats
        assert stats.reads["chat", "engine"] == 1
        assert stats.tokenizer_failures[reason] >= 1
        status, ready = await rig.ask("GET", "/ready")
        assert (status, ready["prompts"][MODEL]["reason"]) == (200, reason)
        assert f'kvatlas_prompts_tokenizer_failures_total{{reason="{reason}"}}' in await rig.page()
        hub.repositories[NAME].error = None
        await origin(rig, "here")


@pytest.mark.process
async def test_a_hub_that_holds_its_answer_holds_nothing_else(hub: StandInHub) -> None:
    hub.hold.clear()
    slow = msgspec.structs.replace(settings(hub), hub_timeout_s=0.3)
    async with running(NAMED) as engines:
        config = msgspec.structs.replace(auto(*engines, hub=hub), prompts=slow)
        async with routing(config) as rig:
            assert "hub_timeout_s" in (await origin(rig, "engine", "too_slow")).problem
            await rig.chat(TEXT)
            # To start the process that fetches takes longer than that on a busy machine.
            rig.router.finder._settings = settings(hub)
            hub.hold.set()
            await origin(rig, "here")


async def test_files_that_cannot_be_read_are_no_end(hub: StandInHub) -> None:
    hub.repositories[NAME].files["tokenizer.json"] = b'{"model": "of some other kind"}'
    async with running(NAMED) as engines, routing(auto(*engines, hub=hub)) as rig:
        assert "tokenizer.json" in (await origin(rig, "engine", "unusable")).problem
        await rig.chat(TEXT)


@pytest.mark.parametrize("root", ["/models/of-the-engine", "auto"])
async def test_a_path_of_another_machine(root: str) -> None:
    async with running({"root": root}) as engines, routing(auto(*engines)) as rig:
        one = await origin(rig, "engine", "not_readable")
        assert "--tokenizer" in one.remedy
        await rig.chat(TEXT)


@pytest.mark.process
async def test_other_tokens_than_the_engines_are_not_used(tmp_path: Path) -> None:
    named = {"root": str(other_tokenizer(tmp_path / "other"))}
    async with running(named) as engines, routing(auto(*engines)) as rig:
        one = await origin(rig, "engine", "differs")
        assert engines[0].base_url in one.problem
        await rig.chat(TEXT)
        assert rig.router.reader.stats.reads["chat", "local"] == 0


@pytest.mark.process
async def test_the_first_prompts_are_compared_too(tmp_path: Path) -> None:
    """A template that differs where no probe does."""
    folder = odd_template(tmp_path / "other")
    async with running({"root": str(folder)}) as engines, routing(auto(*engines)) as rig:
        await origin(rig, "here")
        await rig.chat(TEXT)
        await rig.chat("Odd")
        assert "first prompts" in (await origin(rig, "engine", "differs")).problem


@pytest.mark.process
async def test_an_engine_of_another_kind_is_compared_before_anything_else(tmp_path: Path) -> None:
    """A rollout: as long as both are there, engines are asked; after it, the new one is read here."""
    other = other_tokenizer(tmp_path / "other")

    kinds = LOCAL, {"root": str(other), "tokenizer_dir": str(other)}
    async with running(*kinds) as (old, new), routing(auto(old)) as rig:
        assert (await origin(rig, "here")).source == str(DEMO_TOKENIZER_DIR)
        rig.router.take(auto(old, new))
        await origin(rig, "engine", "differs")
        rig.router.take(auto(new))
        await until(lambda: rig.router.finder.origins()[MODEL].source == str(other), "the new one")
        await rig.chat(TEXT)
        assert rig.router.reader.stats.reads["chat", "local"] == 1


@pytest.mark.process
@pytest.mark.parametrize("configured", [False, True])
async def test_the_models_own_files_say_how_long_a_chunk_is(tmp_path: Path, configured: bool) -> None:
    folder = shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "chunked")
    (folder / "config.json").write_text('{"text_config": {"attention_chunk_size": 128}}')
    groups = (
        GroupSpec(0, "full_attention", 16),
        GroupSpec(1, "chunked_local_attention", 16, attention_chunk_size=128),
    )

    named = {"root": "/models/elsewhere" if configured else str(folder), "groups": groups}
    given = str(folder) if configured else None
    async with running(named) as engines, routing(auto(*engines, tokenizer=given)) as rig:
        await origin(rig, "here")
        await until(lambda: rig.router.scopes.scope(MODEL).facts.has_chunks, "the chunk")
        for _ in range(3):
            await rig.chat(TEXT * 20)
            await rig.caught_up(*engines)
        facts = rig.router.scopes.scope(MODEL).facts
        assert facts.attention_chunk_size == 128
        assert rig.outcomes("exact") >= 2


@pytest.mark.process
@pytest.mark.parametrize("configured", ["directory", "repository"])
async def test_a_configured_tokenizer_that_differs_is_used_and_shown(
    hub: StandInHub, tmp_path: Path, configured: str
) -> None:
    other = other_tokenizer(tmp_path / "other")
    hub.repositories[NAME] = repository_of(other)
    given = str(other) if configured == "directory" else NAME
    async with running({}) as (engine,), fronting(engine) as front:
        config = auto(EngineAddress(front.base_url), hub=hub, tokenizer=given)
        async with routing(config) as rig:
            one = await origin(rig, "here", "differs")
            assert one.source.startswith(given)
            assert front.base_url in one.problem
            await rig.chat(TEXT)
            assert rig.router.reader.stats.reads["chat", "local"] == 1
            _, ready = await rig.ask("GET", "/ready")
            assert (ready["ready"], ready["prompts"][MODEL]["reason"]) == (True, "differs")


@pytest.mark.process
async def test_a_configured_directory_is_compared_by_first_prompts_too(tmp_path: Path) -> None:
    folder = odd_template(tmp_path / "other")
    async with running({}) as (engine,), fronting(engine) as front:
        config = auto(EngineAddress(front.base_url), tokenizer=str(folder))
        async with routing(config) as rig:
            await until(lambda: questions(front) >= len(PROBES), "compared")
            await origin(rig, "here")
            await rig.chat("Odd")
            assert "first prompts" in (await origin(rig, "here", "differs")).problem


@pytest.mark.process
async def test_of_two_roots_the_one_that_can_be_read(hub: StandInHub) -> None:
    """A quantised copy, of which the engine's path is not here, beside the original."""
    copies = [{"root": "/models/copy"}, {"root": "/models/copy"}, NAMED]
    async with running(*copies) as engines, routing(auto(*engines, hub=hub)) as rig:
        assert (await origin(rig, "here")).source.startswith(f"{NAME}@")


@pytest.mark.process
async def test_an_engine_that_does_not_say_its_tokens(hub: StandInHub) -> None:
    async with running(NAMED) as (engine,), fronting(engine) as front:
        for path in ("/tokenize", "/v1/chat/completions/render", "/v1/completions/render"):
            front.overrides[path] = lambda: (404, {})
        config = auto(EngineAddress(front.base_url), hub=hub)
        async with routing(config) as rig:
            assert "/tokenize" in (await origin(rig, "engine", "not_compared")).problem
