"""The doctor before simulated engines, servers and publishers that are broken on purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import zmq
from aiohttp import web

from kvatlas.publisher.block_hash import HashScheme, block_hashes
from kvatlas.publisher.events import BlockStored, Event, encode_tokens
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.findings import Finding, Severity
from kvatlas.router.prompts.settings import ANY_MODEL, PromptSettings
from kvatlas.router.tools.doctor.checks import run_checks
from kvatlas.router.tools.doctor.examine import ExamineSettings, examine
from tests.support.whole_router import LOCAL

MODELS = {"data": [{"id": "m", "root": "m", "parent": None, "max_model_len": 4096}]}
VERSION = {"version": "0.32.0"}
TIMEOUT_S = 2.0
Answers = dict[str, Any]
"""Path -> JSON body (status 200), or (status, bytes, headers)."""


class Findings(list[Finding]):
    """Findings, and how to look for one."""

    def of(self, check: str) -> list[Finding]:
        return [finding for finding in self if finding.check == check]

    def worst(self, check: str) -> Severity:
        """The worst severity of a check; it must have said something."""
        assert self.of(check), f"{check} said nothing: {[f.check for f in self]}"
        return max((f.severity for f in self.of(check)), key=list(Severity).index)

    def expect(self, check: str, severity: Severity, *words: str) -> Finding:
        """The finding of this severity that has all the words, in what was seen, cause or remedy."""
        for finding in self.of(check):
            text = f"{finding.seen} {finding.cause} {finding.remedy}"
            if finding.severity is severity and all(word in text for word in words):
                if severity in {Severity.WARNING, Severity.ERROR}:
                    assert finding.cause, finding
                    assert finding.remedy, finding
                return finding
        raise AssertionError(f"{check} {severity} {words}: {self.of(check) or list(self)}")

    def bad(self) -> list[Finding]:
        return [f for f in self if f.severity in {Severity.WARNING, Severity.ERROR}]


async def examined(
    *engines: EngineAddress | str,
    model: ModelConfig = LOCAL,
    router: str | None = None,
    probe: bool = False,
    seconds: float = 0.2,
    timeout_s: float = TIMEOUT_S,
    prompts: PromptSettings | None = None,
) -> Findings:
    """Findings of the doctor."""
    listed = tuple(EngineAddress(e) if isinstance(e, str) else e for e in engines)
    config = Config(engines=listed, models={ANY_MODEL: model}, prompts=prompts or PromptSettings())
    settings = ExamineSettings(seconds=seconds, timeout_s=timeout_s, probe_timeout_s=10.0, probe=probe)
    seen = await examine(config, settings, router_url=router, progress=lambda _text: None)
    return Findings(run_checks(seen))


@asynccontextmanager
async def http_server(answers: Answers) -> AsyncIterator[str]:
    """A server that says just this, and 404 elsewhere; its URL."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        told = answers.get(request.path, (404, b"{}", {}))
        status, body, headers = told if isinstance(told, tuple) else (200, msgspec.json.encode(told), {})
        return web.Response(status=status, body=body, headers=headers)

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def server(**more: Any) -> Answers:
    """A plain healthy server without events; ``more`` by path name, e.g. ``version=...``."""
    names = {"models": "/v1/models", "sources": "/kv_event_sources"}
    answers: Answers = {"/health": {}, "/v1/models": MODELS, "/version": VERSION, "/kv_event_sources": {}}
    return answers | {names.get(name, f"/{name}"): value for name, value in more.items()}


@contextmanager
def publishing(*, replay: bool = True, **options: Any) -> Iterator[ZmqPublisher]:
    """A publisher with free ports; must be used inside the running loop."""
    address = "tcp://127.0.0.1:*"
    publisher = ZmqPublisher(address, replay_endpoint=address if replay else None, **options)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def bound(kind: int) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A bare socket of this kind on a free port, and its address."""
    socket = zmq.Context.instance().socket(kind)
    try:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"
    finally:
        socket.close(0)


def at(url: str, publisher: ZmqPublisher, **changes: Any) -> EngineAddress:
    """The engine with this server and this publisher."""
    engine = EngineAddress(url, events=publisher.endpoint, replay=publisher.replay_endpoint)
    return msgspec.structs.replace(engine, **changes)


def stored(*, tokens: int = 16, block_size: int = 16, hashes: list[int] | None = None, **more: Any) -> Event:
    """A stored event of a prompt's first tokens, with vLLM's default hashes."""
    real = list(block_hashes(list(range(tokens)), HashScheme(hash_block_size=block_size)))
    fields: dict[str, Any] = {
        "block_hashes": real if hashes is None else hashes,
        "parent_block_hash": None,
        "token_ids": encode_tokens(list(range(tokens))),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return BlockStored(**{**fields, **more})
