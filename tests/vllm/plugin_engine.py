"""Fixtures of tests with a real engine and a feed: the plugin's path, requests, waiting."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from pathlib import Path

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_verification import ProbePrompt
from tests.support.paths import ROOT
from tests.support.waiting import until
from tests.vllm.vllm_engine import VllmEngine

WAIT_S = 240.0


def plugin_path(directory: Path) -> Path:
    """Effect of installing the package on the path: the package, and its entry points."""
    package = directory / "kvatlas"
    package.mkdir(parents=True)
    for name in ("__init__.py", "publisher"):
        (package / name).symlink_to(ROOT / "kvatlas" / name)
    info = directory / "kvatlas-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvatlas\nVersion: 0.1.0\n")
    entry = "[vllm.general_plugins]\nkvatlas = kvatlas.publisher.vllm_plugin:register\n"
    assert 'kvatlas = "kvatlas.publisher.vllm_plugin:register"' in (ROOT / "pyproject.toml").read_text()
    (info / "entry_points.txt").write_text(entry)
    return directory


BLOCK_TOKENS = 32
ENGINE_ARGUMENTS = (
    "--block-size",
    str(BLOCK_TOKENS),
    "--max-model-len",
    "2048",
    "--max-num-batched-tokens",
    "256",
)


def complete(engine: VllmEngine, token_ids: list[int], *, max_tokens: int = 4) -> int:
    """Send a prompt; the tokens the engine took from its cache."""
    body = {"model": "tiny", "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{engine.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        usage = json.load(answer)["usage"]
    details = usage["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


async def ready(feed: Feed) -> None:
    await until(lambda: feed.state is FeedState.READY)


async def settled(engine: VllmEngine, fleet: FleetResidency) -> None:
    """Until the index has all that earlier requests caused: an engine publishes in order, and a block of a
    prompt that comes after them is there."""
    prompt = [random.randrange(10, 1000) for _ in range(BLOCK_TOKENS + 1)]
    await asyncio.to_thread(complete, engine, prompt, max_tokens=1)
    await until(lambda: fleet.predict(ProbePrompt(prompt, NO_EXTRAS), ["e"])["e"].hit_tokens == BLOCK_TOKENS)
