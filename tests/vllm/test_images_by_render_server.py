"""Images: a render server of real vLLM is asked once for each; next turns are read here, as vLLM has them."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.fleet.engine_calls import EngineCalls
from kvatlas.router.openai.apis import CHAT, MESSAGES
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader, PromptSettings
from tests.support.ports import free_ports
from tests.support.prompts.readers import chat, request, say
from tests.vllm.tiny_image_model import png, write_tiny_image_model
from tests.vllm.vllm_engine import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
RED, WIDE, TALL = png(60, 60, (255, 0, 0)), png(200, 50, (0, 9, 255)), png(70, 200, (1, 2, 3))
SCHEME = HashScheme()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def url(vllm_python: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    words = ["vllm.entrypoints.launchers.render.entry", "--model", str(folder), "--served-model-name", "m"]
    words += ["--host", "127.0.0.1", "--port", str(port)]  # what `vllm launch render` runs
    log = tmp_path_factory.mktemp("logs") / "render.log"
    with VllmServer(vllm_python, words, base_url=f"http://127.0.0.1:{port}", log=log) as server:
        yield server.base_url


def told(url: str, path: str, body: dict[str, Any]) -> tuple[list[int], list[tuple[str, int, int]]]:
    """Tokens and items of images, as vLLM says them."""
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{url}{path}/render", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        found = json.loads(answer.read())
    features = found["features"]
    places = [(place["offset"], place["length"]) for place in features["mm_placeholders"]["image"]]
    names = features["mm_hashes"]["image"]
    return found["token_ids"], [(name, *place) for name, place in zip(names, places, strict=True)]


def shown(*images: str) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{image}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return say("user", [{"type": "text", "text": "What is on these? " * 4}, *parts])


def turns() -> list[tuple[str, dict[str, Any], str]]:
    """Requests in order, and who must have read them."""
    first, answer = shown(RED), say("assistant", "A red one. " * 8)
    both = [first, answer, shown(WIDE, TALL)]
    source = {"type": "base64", "media_type": "image/png", "data": RED}
    block = say("user", [{"type": "text", "text": "What?"}, {"type": "image", "source": source}])
    return [
        (CHAT, chat(first), "renderer"),
        (CHAT, chat(first, answer, say("user", "Sure?")), "local"),
        (CHAT, chat(*both), "renderer"),
        (CHAT, chat(*both, say("assistant", "Two more."), say("user", "And?")), "local"),
        (CHAT, chat(say("system", "Other."), shown(RED)), "local"),
        (MESSAGES, {"model": "m", "max_tokens": 5, "messages": [block]}, "local"),
        (CHAT, chat(shown(TALL, WIDE)), "renderer"),
    ]


async def test_images_are_asked_for_once_and_read_as_vllm_reads_them(url: str, folder: Path) -> None:
    calls = EngineCalls({}, ssl.create_default_context(), health_timeout_s=5.0)
    settings = PromptSettings(renderers=(url,), engine_timeout_s=60.0)
    models = {"m": ModelPrompts(tokenizer_dir=str(folder))}
    async with calls.open():
        reader = PromptReader(models, settings, calls.post)
        for path, body, source in turns():
            prompt = await reader.read(request(body, path))
            assert isinstance(prompt, Prompt), prompt
            items = [(item.identifier, item.offset, item.length) for item in prompt.extras.multimodal]
            expected = await asyncio.to_thread(told, url, path, body)
            assert (list(prompt.token_ids), items, prompt.source) == (*expected, source)
            asking = PromptReader(models, settings, calls.post)
            asked = await asking.read(request(body, path))
            assert isinstance(asked, Prompt)
            assert asked.source == "renderer"
            assert prompt.hashes(SCHEME) == asked.hashes(SCHEME)
            asking.close()
        assert len({length for _, _, length in items}) == len(items)  # shapes differ in their tokens
        reader.close()
