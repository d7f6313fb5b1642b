"""Collection of the evidence that the checks need: HTTP, event sockets, tokenizers, probes, the router.

All engines are examined concurrently, each step within its own time limit, so that the whole takes about
``seconds`` plus the slowest server's timeouts. Nothing is changed at an engine; only ``probe`` sends
requests that it has to compute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvatlas.router.config.schema import Config
from kvatlas.router.engine_lifecycle import complete, setup_evidence
from kvatlas.router.fleet.engine_client import Ask, EngineClient
from kvatlas.router.fleet.engine_metrics import read_statement
from kvatlas.router.fleet.engine_probe import EngineProbe, EngineProber
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.salt_proof import SaltProver
from kvatlas.router.fleet.statement import SERVER_INFO, event_sources, server_info_statement, sglang_engines
from kvatlas.router.fleet.status import ModelCard, kind_of
from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.tls import client_context
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.places import GPU
from kvatlas.router.observe.findings import Finding
from kvatlas.router.prompts.hub import TokenizerProblem
from kvatlas.router.prompts.model_config import ModelConfigFile, read_model_file
from kvatlas.router.prompts.model_dir import ModelDirError
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.prompts.settings import ANY_MODEL, ModelPrompts
from kvatlas.router.prompts.tokenizer_finder import locate
from kvatlas.router.prompts.tokenizer_source import TokenizerSource, named_by_engine, parse_source
from kvatlas.router.prompts.trial import Trials
from kvatlas.router.tools.doctor.engine_gauges import read_engine_gauges, series
from kvatlas.router.tools.doctor.evidence import (
    EngineEvidence,
    EventSource,
    Evidence,
    ProbeEvidence,
    PromptParity,
    RouterEvidence,
    ServerEvidence,
)
from kvatlas.router.tools.doctor.http import Http, HttpAnswer
from kvatlas.router.tools.doctor.listener import EventListener
from kvatlas.router.tools.doctor.prober import DoctorsEngine
from kvatlas.router.tools.doctor.tokenizer_parity import compare
from kvatlas.router.tools.ops_client import ops_headers
from kvatlas.router.tools.replay_player import CountingIndex

_DETECTION_S_MAX = 20.0
_PROBE_QUIET_S = 0.3
_ENGINES_MAX = 256


class ExamineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of an examination, in seconds."""

    seconds: float = 3.0
    """Seconds to listen for live events."""
    timeout_s: float = 5.0
    """For one HTTP response, and for silence of a replay socket."""
    probe_timeout_s: float = 60.0
    """For one completion of the probe."""
    probe: bool = False


class _Models(msgspec.Struct):
    data: list[ModelCard]


async def examine(
    config: Config, settings: ExamineSettings, *, router_url: str | None, progress: Callable[[str], None]
) -> Evidence:
    """Examine all engines of ``config``, or without any those the router names.

    Args:

      progress: Called with the current step, for a progress display.

    Raises:

      ModelDirError: A tokenizer directory is unusable.
      TlsError: A certificate of ``config.fleet`` is unusable.
    """
    tls = client_context(config.fleet.tls, "fleet.ca_file, client_cert_file or client_key_file")
    async with HttpClient(tls=tls) as client:
        http = Http(client, settings.timeout_s)
        router = None
        if router_url is not None:
            progress("querying the router")
            router = await query_router(http, router_url)
        engines = config.engines or _engines_of(router)
        progress(f"querying {len(engines)} engine(s)")
        seen = await _ask_servers(http, config, engines)
        seen.router, seen.probed, seen.seconds = router, settings.probe, settings.seconds

        for engine in seen.engines:
            engine.router_tokenizers = None if router is None else router.tokenizers
        examination = _Examination(seen, http, settings, progress)
        try:
            await examination.run()
        finally:
            examination.close()
    return seen


async def query_router(http: Http, url: str) -> RouterEvidence:
    """Query a router's own endpoints."""
    own = ("engines", "sources", "problems")
    paths = ("/ready", "/metrics", "/version", *(f"/kvatlas/{name}" for name in own))
    ready, metrics, version, engines, sources, problems = await asyncio.gather(
        *(http.get(url + path, ops_headers()) for path in paths)
    )
    listed = engines.json(list[dict[str, Any]]) if engines.ok else None
    by_id = None if listed is None else {str(e.get("engine")): e for e in listed}
    fields = version.json(dict[str, Any]) or {}
    origins = sources.json(dict[str, dict[str, Any]]) if sources.ok else None
    return RouterEvidence(
        url,
        ready,
        engines,
        metrics,
        str(fields.get("version", "")),
        by_id,
        origins,
        _tokenizers(metrics) if metrics.ok else None,
        [one for found in (problems.json(dict[str, list[Finding]]) or {}).values() for one in found],
    )


def _tokenizers(metrics: HttpAnswer) -> dict[str, str] | None:
    """Return the library by configured model; None if the router does not report it."""
    page = metrics.body.decode("utf-8", "replace")
    rows = [labels for name, labels, _ in series(page) if name == "kvatlas_tokenizer_info"]
    found = {labels.get("model", ""): labels.get("library", "") for labels in rows}
    says = bool(rows) or "# HELP kvatlas_tokenizer_info " in page
    return {model: library for model, library in found.items() if library} if says else None


def _engines_of(router: RouterEvidence | None) -> tuple[EngineAddress, ...]:
    """Return the router's engines by id; ranks and endpoints are read from the servers."""
    ids = list((router.engines if router is not None else None) or {})[:_ENGINES_MAX]
    urls = dict.fromkeys(engine_id.partition("#")[0].rstrip("/") for engine_id in ids)
    return tuple(EngineAddress(url) for url in urls if url.startswith(("http://", "https://")))


async def _ask_servers(http: Http, config: Config, engines: tuple[EngineAddress, ...]) -> Evidence:
    urls = list(dict.fromkeys(engine.base_url for engine in engines))
    servers = dict(zip(urls, await asyncio.gather(*(_ask_server(http, url) for url in urls)), strict=True))
    found: list[EngineEvidence] = []
    for url, server in servers.items():
        configured = [engine for engine in engines if engine.base_url == url]
        given = any(engine.events is not None for engine in configured)
        ranks = configured if given else _discovered(url, server) or configured
        found += [_engine_seen(engine, server, config, sources_ignored=given) for engine in ranks]
    return Evidence(config, found)


async def _ask_server(http: Http, url: str) -> ServerEvidence:
    paths = ("/health", "/v1/models", "/version", "/kv_event_sources", "/metrics", SERVER_INFO, "/ready")
    health, models_answer, version_answer, sources, metrics, info, ready = await asyncio.gather(
        *(http.get(url + path) for path in paths)
    )
    stated = server_info_statement(info.body) if info.ok else None
    seen = ServerEvidence(health, models_answer, version_answer, sources, metrics, server_info=stated)
    # Engines have no such path, or no such answer.
    seen.is_router = {"ready", "engines"} <= (ready.json(dict[str, Any]) or {}).keys()
    models = seen.models_answer.json(_Models) if seen.models_answer.ok else None
    seen.models = tuple(models.data) if models is not None else ()
    version = seen.version_answer.json(dict[str, Any]) if seen.version_answer.ok else None
    seen.version_text = str((version or {}).get("version", ""))
    if seen.sources_answer.ok:
        seen.sources = seen.sources_answer.json(dict[str, EventSource | None])
    return seen


def _discovered(url: str, server: ServerEvidence) -> list[EngineAddress]:
    """Return one engine per data-parallel rank that publishes, parsed as the router does."""
    stated = server.server_info
    if kind_of(None, stated, server.models) == "sglang":
        return sglang_engines(url, None if stated is None else stated.event_ports)
    try:
        return event_sources(url, server.sources_answer.body) if server.sources_answer.ok else []
    except ValueError:
        return []


def _engine_seen(
    engine: EngineAddress, server: ServerEvidence, config: Config, *, sources_ignored: bool
) -> EngineEvidence:
    base = next((card.id for card in server.models if card.parent is None), None)
    model_config = config.model(base or ANY_MODEL)
    adapters = {card.id: card.root for card in server.models if card.parent is not None and card.root}
    return EngineEvidence(
        engine,
        server,
        model_config,
        {**adapters, **model_config.lora_paths},
        read_engine_gauges(server.metrics_answer.body, engine.dp_rank),
        sources_ignored=sources_ignored and engine.events is not None,
    )


def _setup(engine: EngineEvidence) -> SetupEvidence:
    """Collect the setup evidence that the router would use."""
    configured, server = engine.model_config.facts(), engine.server
    stated = read_statement(server.metrics_answer.body, engine.engine.dp_rank)
    facts = complete(configured, engine.model_file)
    return setup_evidence(engine.kind, (server.server_info, stated), engine.model_file, configured, facts)


def asker(http: Http, engine: EngineAddress, timeout_s: float) -> Ask:
    """Return how the probe asks this engine."""
    headers = {} if engine.dp_rank is None else {"x-data-parallel-rank": str(engine.dp_rank)}

    async def ask(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        url = engine.base_url + path
        if method == "GET":
            answer = await http.get(url)
        else:
            answer = await http.post(url, body, headers=headers, timeout_s=timeout_s)
        if answer.problem:
            raise OSError(answer.problem)
        return answer.status, answer.body

    return ask


def salt_prover(http: Http, engine: EngineEvidence, model: str, timeout_s: float) -> SaltProver:
    """Return the prover of the engine's salts, with what the router knows of its cache."""
    stated, rank = engine.server.server_info, engine.engine.dp_rank
    if stated is None:
        stated = read_statement(engine.server.metrics_answer.body, rank)
    return SaltProver(
        asker(http, engine.engine, timeout_s),
        model,
        engine.kind,
        block_tokens=None if stated is None else stated.attention_block_size,
        tokens_max=next(card for card in engine.server.models if card.id == model).max_model_len,
        caches=stated is None or stated.caches_prefixes is not False,
    )


class _Examination:
    """The steps that listen, tokenize and probe."""

    def __init__(
        self, seen: Evidence, http: Http, settings: ExamineSettings, progress: Callable[[str], None]
    ) -> None:
        self._seen = seen
        self._http = http
        self._settings = settings
        self._progress = progress
        self._ledgers: dict[str, CountingIndex] = {}
        self._scopes = ModelIndexes(self._facts, self._new_ledger)
        self._listeners: dict[str, EventListener] = {}
        self._probed_url: str | None = None
        self._reader = self._make_reader()

    def close(self) -> None:
        """Stop the reader's threads."""
        self._reader.close()

    async def run(self) -> None:
        """Fill in ``Evidence``."""
        await self._find_tokenizers()
        for engine in self._seen.engines:
            residency = self._scopes.assign(engine.engine_id, _scope_name(engine))
            residency.writer.learn_setup(_setup(engine))
        async with self._listening():
            await asyncio.gather(self._listen(), self._compare())
            if self._settings.probe:
                await self._probe_all()
        for engine in self._seen.engines:
            engine.residency = self._scopes.engine(engine.engine_id)
            engine.removals = self._removals(engine)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        tasks = []
        for engine in self._seen.engines:
            address = engine.engine.events
            if address is None:
                continue
            listener = EventListener(
                engine.engine_id,
                address,
                engine.engine.replay,
                self._scopes,
                replay_timeout_s=self._settings.timeout_s,
            )
            engine.sockets, engine.event_counts = listener.seen, listener.event_counts
            self._listeners[engine.engine_id] = listener
            tasks.append(asyncio.create_task(listener.run(), name=f"listener {engine.engine_id}"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Listen for the configured time, then let seed searches finish."""
        if self._listeners:
            self._progress(f"listening to events for {self._settings.seconds:g} s")
        limit = self._settings.seconds + 4 * self._settings.timeout_s + _DETECTION_S_MAX
        waits = [asyncio.create_task(listener.settled.wait()) for listener in self._listeners.values()]
        listened = asyncio.create_task(asyncio.sleep(self._settings.seconds if self._listeners else 0))
        await asyncio.wait([listened, *waits], timeout=limit)
        for wait in waits:
            wait.cancel()
        await self._finish_detection()

    async def _probe_all(self) -> None:
        """Probe one engine after another, so that one's prefill cannot delay another's response."""
        for engine in self._seen.engines:
            self._progress(f"probing {engine.engine_id}")
            self._probed_url = engine.engine.base_url
            engine.probe = await self._probe(engine)
        await self._finish_detection()

    async def _finish_detection(self) -> None:
        deadline = time.monotonic() + _DETECTION_S_MAX
        while self._searching() and time.monotonic() < deadline:
            self._scopes.advance_detection()
            await asyncio.sleep(0)

    def _searching(self) -> bool:
        engines = [self._scopes.engine(engine.engine_id) for engine in self._seen.engines]
        return any(e is not None and e.searching for e in engines)

    async def _probe(self, engine: EngineEvidence) -> ProbeEvidence:
        model = engine.base_model
        if model is None:
            return ProbeEvidence(EngineProbe(""), problem="the engine names no model")
        seen = ProbeEvidence(EngineProbe(model))
        card = next(card for card in engine.server.models if card.id == model)
        listener = self._listeners.get(engine.engine_id)
        prober = EngineProber(
            EngineClient(asker(self._http, engine.engine, self._settings.probe_timeout_s)),
            DoctorsEngine(
                engine.engine,
                model,
                self._scopes.scope(_scope_name(engine)),
                self._reader,
                listener,
                engine.frontend,
            ),
            model,
            publishes=listener is not None,
            tokens_max=card.max_model_len,
            events_s_max=self._settings.timeout_s,
            quiet_s=_PROBE_QUIET_S,
        )
        seen.requests = prober.requests
        try:
            await prober.probe(seen.found)
            if seen.completions and seen.completions[-1].failed is None:
                await salt_prover(self._http, engine, model, self._settings.probe_timeout_s).prove(seen.salts)
        except Exception as problem:  # noqa: BLE001  a misbehaving engine must not end the examination
            seen.problem = describe_error(problem)
        return seen

    def _removals(self, engine: EngineEvidence) -> dict[str, int]:
        counts = [
            count
            for (engine_id, plane), count in self._ledgers[_scope_name(engine)].counts.items()
            if engine_id == engine.engine_id and plane.medium == GPU
        ]
        names = {"stored": "stored", "removed": "removed", "unknown": "unknown_removals"}
        return {name: sum(getattr(count, field) for count in counts) for name, field in names.items()}

    def _new_ledger(self, scope_name: str) -> CountingIndex:
        ledger = self._ledgers[scope_name] = CountingIndex()
        return ledger

    async def _find_tokenizers(self) -> None:
        """Locate a tokenizer for each base model as the router does: named by its engines, or configured."""
        trials = Trials()
        found: dict[tuple[str, str], tuple[str, ModelConfigFile, TokenizerProblem | None]] = {}
        for engine in self._seen.engines:
            model, setting = engine.base_model, engine.model_config.tokenizer
            source = parse_source(setting)
            if model is None or source.kind in {"off", "directory"}:
                engine.tokenizer = source.name
                if source.kind == "directory":
                    engine.model_file = await asyncio.to_thread(read_model_file, Path(source.name))
                continue
            root = next((card.root or "" for card in engine.server.models if card.id == model), "")
            if source.kind == "auto":
                source = named_by_engine(root)
            if (model, str(source)) not in found:
                self._progress(f"looking for the tokenizer of {model}")
                found[model, str(source)] = await self._find_tokenizer(model, engine, trials, source)
            engine.tokenizer, engine.model_file, engine.tokenizer_problem = found[model, str(source)]

    async def _find_tokenizer(
        self, model: str, engine: EngineEvidence, trials: Trials, source: TokenizerSource
    ) -> tuple[str, ModelConfigFile, TokenizerProblem | None]:
        try:
            located = await locate(source, engine.model_config.prompts(), self._seen.config.prompts, trials)
        except TokenizerProblem as problem:
            return "", ModelConfigFile(), problem
        file = await asyncio.to_thread(read_model_file, located.folder)
        prompts = replace(engine.model_config.prompts(), tokenizer_dir=str(located.folder))
        try:
            self._reader.use(model, (prompts, await asyncio.to_thread(self._reader.load, prompts)))
        except (ModelDirError, OSError) as error:
            return (
                "",
                file,
                TokenizerProblem("unusable", f"{located.shown}: {error}", "give --tokenizer with another"),
            )
        return located.shown, file, None

    async def _compare(self) -> None:
        """Compare tokenizers, once per server."""
        servers = {engine.engine.base_url: engine for engine in self._seen.engines}
        results = await asyncio.gather(*(self._compare_one(engine) for engine in servers.values()))
        by_url = dict(zip(servers, results, strict=True))
        for engine in self._seen.engines:
            engine.parity = by_url[engine.engine.base_url]
            local = self._reader.local_of(engine.base_model or ANY_MODEL)
            if local is not None:
                engine.tokenized_by, engine.unreadable = local.tokenizer.name, local.renderer.unreadable
                if local.renderer.reads_clock:
                    engine.time_zone = engine.model_config.time_zone or time.strftime("%Z (UTC%z)")

    async def _compare_one(self, engine: EngineEvidence) -> list[PromptParity]:
        model = engine.base_model
        if model is None or not engine.tokenizer:
            return []
        return await compare(self._reader, self._http, engine.engine.base_url, model, engine.frontend)

    def _make_reader(self) -> PromptReader:
        """Build the prompt reader that serves traffic; it asks only the engine being probed for tokens."""
        models = {name: model.prompts() for name, model in self._seen.config.models.items()}
        models.setdefault(ANY_MODEL, ModelPrompts())
        settings = replace(self._seen.config.prompts, engine_timeout_s=self._settings.timeout_s)
        return PromptReader(
            models, settings, self._post, engine_url=lambda _model, _frontend: self._probed_url
        )

    async def _post(
        self, url: str, body: bytes, _headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        answer = await self._http.post(url, body, timeout_s=timeout_s)
        if not answer.status:
            raise OSError(f"{url}: {answer.problem}")
        return answer.status, answer.body

    def _facts(self, scope_name: str) -> ModelFacts:
        engine = next(e for e in self._seen.engines if _scope_name(e) == scope_name)
        facts = complete(engine.model_config.facts(), engine.model_file)
        return replace(facts, lora_paths=engine.lora_paths)


def _scope_name(engine: EngineEvidence) -> str:
    return engine.base_model or ""
