"""Images: asked for once, then known by their content; always the engine's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.openai.apis import CHAT, MESSAGES, RESPONSES
from kvatlas.router.prompts import images as media_module
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader, PromptSettings
from tests.support.prompts.images import MARK, TEMPLATE, Engine, shows
from tests.support.prompts.readers import chat, model_dir, read, read_affinity, read_prompt, reader, say

_SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
MESSAGE = say("user", [{"type": "text", "text": "What?"}, {"type": "image", "source": _SOURCE}])
INPUT = say("user", [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("m"), None)


def make(folder: Path, engine: Engine, **settings: Any) -> PromptReader:
    models = {"m": ModelPrompts(tokenizer_dir=str(folder), chat_template=TEMPLATE)}
    return reader(models, PromptSettings(renderers=("http://r",), **settings), post=engine.post)


def exact(side: PromptReader, engine: Engine, body: dict[str, Any], path: str = CHAT) -> Prompt:
    found = read_prompt(side, body, path)
    expected = engine.render(body, is_messages=path == MESSAGES)
    assert list(found.token_ids) == expected["token_ids"]
    items = [(item.identifier, item.offset, item.length) for item in found.extras.multimodal]
    hashes, places = (
        expected["features"]["mm_hashes"]["image"],
        expected["features"]["mm_placeholders"]["image"],
    )
    assert items == [(h, p["offset"], p["length"]) for h, p in zip(hashes, places, strict=True)]
    return found


def test_a_next_turn_with_the_same_images_needs_no_call(folder: Path) -> None:
    engine = Engine()
    side = make(folder, engine)
    turns = [shows("What is this? " * 20, "AAAA"), say("assistant", "A cat."), shows("And this?", "BBBBBB")]
    assert exact(side, engine, chat(*turns[:1])).source == "renderer"
    assert exact(side, engine, chat(*turns)).source == "renderer"  # another image
    assert engine.calls == 2
    longer = [*turns, say("assistant", "A dog."), say("user", "Sure?")]
    prompt = exact(side, engine, chat(*longer))
    assert (engine.calls, prompt.source) == (2, "local")
    scheme = HashScheme()
    fresh = make(folder, engine)
    assert prompt.hashes(scheme) == exact(fresh, engine, chat(*longer)).hashes(scheme)
    assert (side.stats.media_hits, side.stats.media_misses) == (1, 2)
    assert side.stats.media_bytes > 0


def test_equal_images_elsewhere_are_known_and_more_of_them_are_asked_for(folder: Path) -> None:
    engine = Engine()
    side = make(folder, engine)
    exact(side, engine, chat(shows("One", "AAAA")))
    assert exact(side, engine, chat(say("system", "Other"), shows("text", "AAAA"))).source == "local"
    exact(side, engine, chat(shows("Two", "AAAA", "AAAA")))  # an image has more tokens there
    assert engine.calls == 2


def test_messages_with_images_are_read_the_same_way(folder: Path) -> None:
    engine = Engine()
    side = make(folder, engine)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    first = say("user", [{"type": "text", "text": "What?"}, {"type": "image", "source": source}])
    body = {"model": "m", "max_tokens": 5, "messages": [first]}
    exact(side, engine, body, MESSAGES)
    body["messages"] = [first, say("assistant", "A cat."), say("user", "Sure?")]
    assert exact(side, engine, body, MESSAGES).source == "local"
    assert exact(side, engine, chat(shows("As a chat", "AAAA"))).source == "local"
    assert engine.calls == 1


def test_a_mark_in_the_text_and_web_addresses_are_asked_for(folder: Path) -> None:
    engine = Engine()
    side = make(folder, engine)
    exact(side, engine, chat(shows("One", "AAAA")))
    calls = engine.calls
    faked = chat(say("user", [{"type": "text", "text": f"No image: {MARK}"}]), shows("One", "AAAA"))
    with pytest.raises(IndexError):  # this engine takes the mark for an image, and there is none
        read(side, faked)
    assert engine.calls == calls + 1
    web = say("user", [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])
    assert exact(side, engine, chat(web)).source == "renderer"
    assert exact(side, engine, chat(web)).source == "renderer"


def test_known_images_are_compared_now_and_then_and_a_difference_ends_their_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_module, "CHECK_EVERY", 2)
    engine = Engine()
    side = make(folder, engine)
    body = chat(shows("One", "AAAA"))
    assert [exact(side, engine, body).source for _ in range(3)] == ["renderer", "local", "renderer"]
    assert (side.stats.media_checks, side.stats.media_mismatches) == (1, 0)
    engine.tokens_more = 1  # as if the engines had been started with other options
    read(side, body)
    assert [exact(side, engine, body).source for _ in range(3)] == ["renderer"] * 3
    assert side.stats.media_mismatches == 1


def test_the_memory_of_images_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.reader.MEDIA_CACHE_BYTES_MAX", 10_000)
    engine = Engine()
    side = make(folder, engine)
    for number in range(40):
        exact(side, engine, chat(shows("x", f"A{number}")))
    assert side.stats.media_bytes <= 10_000
    assert side.stats.media_evictions > 20


def test_without_anybody_to_ask_images_go_by_text(folder: Path) -> None:
    models = {"m": ModelPrompts(tokenizer_dir=str(folder), chat_template=TEMPLATE)}
    side = reader(models)
    assert read_affinity(side, chat(shows("One", "AAAA"))).reason == "multimodal"


@pytest.mark.parametrize("tokenizer", ["here", "off"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(shows("One", "AAAA"))),
        (CHAT, chat(say("user", [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]))),
        (CHAT, chat(say("user", [{"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}]))),
        (MESSAGES, {"model": "m", "max_tokens": 1, "messages": [MESSAGE]}),
        (RESPONSES, {"model": "m", "input": [INPUT]}),
    ],
)
def test_an_engine_that_tells_tokens_without_the_hashes_of_images_is_not_believed(
    path: str, body: dict[str, Any], tokenizer: str, folder: Path
) -> None:
    """Two images of one shape would be one prompt: the second was promised what the first one left."""
    asked = []

    async def post(url: str, data: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        asked.append(url)
        return (200, b'{"tokens": [1, 2, 3]}') if url.endswith("/tokenize") else (403, b"")

    models = {"m": ModelPrompts(tokenizer_dir=str(folder), chat_template=TEMPLATE)}
    models = models if tokenizer == "here" else {"m": ModelPrompts()}
    side = reader(models, post=post, engine_url=lambda *_: "http://e")
    read_affinity(side, body, path)
    assert [url for url in asked if url.endswith("/tokenize")] == []
    if tokenizer == "off":  # a text that only speaks of images
        found = read(side, chat(say("user", 'What is "image_url"?')))
        assert isinstance(found, Prompt)
        assert list(found.token_ids) == [1, 2, 3]
