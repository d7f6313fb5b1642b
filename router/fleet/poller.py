"""Polls every server: the models it serves, its event endpoints, its load.

One task per server, started and ended as servers join and leave (``assign``). ``GET /v1/models`` shows
whether a server is up; so do responses to clients since the last poll, because an API process may be too busy
for polls. ``GET /kv_event_sources`` (vLLM 0.31+) returns its ranks and event endpoints unless they are
configured; it is repeated while the server reports any, since a restart may move them. ``GET /server_info``
has the set-up of each process, and SGLang's event endpoints. ``GET /metrics`` gives running and waiting
requests, which include the load of other clients. A listener is called on changes. A server that does not
answer is polled more often. Invariant: no answer of a server and no error of a listener ends the polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from kvatlas.router.fleet.engine_client import REQUEST_S_MAX
from kvatlas.router.fleet.engine_metrics import (
    METRICS,
    METRICS_BY_NAME,
    SleepState,
    names_read,
    read_gauges,
    read_obeys_hints,
    read_pool_blocks,
    read_sleep,
    read_started,
    read_statement,
    read_transfers,
)
from kvatlas.router.fleet.engines import DesiredFleet
from kvatlas.router.fleet.salt_proof import SaltProof, SaltProver
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.fleet.shared_proofs import SharedProofs
from kvatlas.router.fleet.statement import (
    SERVER_INFO,
    EngineStatement,
    event_sources,
    server_info_statement,
    sglang_engines,
)
from kvatlas.router.fleet.status import E, EngineStatus, Fleet, ModelCard, Reassigned, kind_of
from kvatlas.router.http.client import HttpClient, TooLongError
from kvatlas.router.http.descriptors import is_out_of_descriptors
from kvatlas.router.http.error_texts import NotConnectedError, describe_error
from kvatlas.router.observe.log_throttle import LogThrottle

_log = structlog.get_logger()


E_contra = TypeVar("E_contra", bound=EngineStatus, contravariant=True)


class FleetListener(Protocol[E_contra]):
    """Is notified of changes of the fleet."""

    def engine_up(self, engine: E_contra, /) -> None:
        """Handle an engine that answers for the first time, again, or with other models or event
        endpoints."""

    def engine_down(self, engine: E_contra, /) -> None:
        """Handle an engine that stopped answering."""

    def engine_asleep(self, engine: E_contra, /, *, woke: bool) -> None:
        """Handle an engine whose caches sleep has emptied; ``woke``: since the last poll, and it is awake
        again."""

    def engine_restarted(self, engine: E_contra, /) -> None:
        """Handle an engine whose metrics show another process than before."""

    def engine_load(self, engine: E_contra, /, *, running: int, waiting: int) -> None:
        """Handle the engine's own gauges."""


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Version(msgspec.Struct):
    version: str | None = None


# Statuses by which a server permanently refuses an endpoint.
_ABSENT = frozenset({401, 403, 404, 405, 501})
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_PROBLEM_LENGTH_MAX = 300
# Of one answer: a million token ids as JSON.
ANSWER_BYTES_MAX = 8 << 20
# Interval of repeated warnings that an engine does not answer.
_SILENT_EVERY_S = 60.0
_T = TypeVar("_T")


class FleetPoller(Generic[E]):
    """Runs one polling task per server until cancelled."""

    def __init__(
        self,
        fleet: Fleet[E],
        listener: FleetListener[E],
        settings: FleetSettings,
        client: HttpClient,
    ) -> None:
        self._fleet = fleet
        self._listener = listener
        self._client = client
        self.configure(settings)
        self.versions = False
        """Whether engines without a role are asked for their version too."""
        self.versions_once = False
        """Whether those of vLLM's Python frontend are, when they come up."""
        self._seldom = LogThrottle(_SILENT_EVERY_S)
        self._missed: dict[str, int] = {}  # number of failed polls in a row
        # Number of responses to clients at each server's last poll.
        self._answers: dict[str, int] = {}
        # Servers with a missed poll that did not time out.
        self._not_only_slow: set[str] = set()
        # Servers that are up and reported that they publish no events.
        self._settled: set[str] = set()
        # Samples on the whole page of each server that may be asked for them by name; empty: not by name.
        self._samples: dict[str, frozenset[bytes]] = {}
        # Statements of servers whose /server_info has been read; None: refused, or of another kind.
        self._informed: dict[str, EngineStatement | None] = {}
        # What is known of the salts of servers that are up, and when it is to be tried again.
        self._proofs: dict[str, SaltProof] = {}
        self._proofs_due: dict[str, float] = {}
        self.shared_proofs: SharedProofs | None = None
        """Proofs of other routers; None: there are no others."""
        # Servers that were found to be another process, until their salts are tried.
        self._restarted: set[str] = set()
        self._watching: dict[str, asyncio.Task[None]] = {}
        # Servers whose first poll has not ended.
        self._unasked: set[str] = set()
        self._all_asked = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    def configure(self, settings: FleetSettings) -> None:
        """Change the poll intervals, from the next poll on."""
        self._settings = settings

    async def run(self) -> None:
        """Poll every server of the fleet; returns only by cancellation."""
        async with asyncio.TaskGroup() as self._tasks:
            for base_url in {status.engine.base_url for status in self._fleet}:
                self._start(base_url)
            await asyncio.Event().wait()

    async def first_polls(self, wait_s: float) -> None:
        """Return once there are servers and each has been polled, at most ``wait_s`` later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._all_asked.wait()

    def _asked(self, base_url: str) -> None:
        self._unasked.discard(base_url)
        if not self._unasked:
            self._all_asked.set()

    def assign(self, wanted: DesiredFleet) -> Reassigned:
        """Replace the fleet; start polling new servers and notify listeners of removed ones."""
        changes = self._fleet.assign(wanted)
        for base_url in (*changes.dropped, *changes.touched):
            self._stop(base_url)
        for engine_id in changes.moved:
            status = self._fleet.get(engine_id)
            if status is not None and status.up:
                self._notify(self._listener.engine_up, status)
        for base_url in (*changes.new, *changes.touched):
            self._start(base_url)
        return changes

    def _start(self, base_url: str) -> None:
        if self._tasks is not None and base_url not in self._watching:
            self._unasked.add(base_url)
            task = self._tasks.create_task(self._watch(base_url), name=f"poll {base_url}")
            self._watching[base_url] = task

    def _stop(self, base_url: str) -> None:
        """End a server's polling; an answer still in transit is ignored."""
        task = self._watching.pop(base_url, None)
        if task is not None:
            task.cancel()
            self._unasked.discard(base_url)
        self._missed.pop(base_url, None)
        self._answers.pop(base_url, None)
        self._not_only_slow.discard(base_url)
        self._settled.discard(base_url)
        self._informed.pop(base_url, None)
        self._samples.pop(base_url, None)
        self._proofs.pop(base_url, None)
        self._proofs_due.pop(base_url, None)
        self._restarted.discard(base_url)

    def _notify(self, listener: Callable[[_T], None], about: _T) -> None:
        try:
            listener(about)
        except Exception:  # noqa: BLE001  # one engine must not keep the others from being added
            _log.exception("listener failed", about=str(getattr(about, "engine_id", about)))

    async def _watch(self, base_url: str) -> None:
        now = asyncio.get_running_loop().time
        models_due = gauges_due = now()
        while True:
            try:
                up = any(status.up for status in self._fleet.ranks(base_url))
                if now() >= models_due or (up and self._is_overdue(base_url)):
                    answered = await self._ask_models(base_url)
                    self._asked(base_url)
                    up = any(status.up for status in self._fleet.ranks(base_url))
                    settings = self._settings
                    models_due = now() + (settings.poll_interval_s if answered else settings.down_interval_s)
                if up and now() >= gauges_due:
                    await self._ask_gauges(base_url)
                    gauges_due = now() + self._settings.gauges_s
            except Exception as error:  # noqa: BLE001  # one server must not end the polling of all
                _log.exception("polling failed", server=base_url)
                for status in self._fleet.ranks(
                    base_url
                ):  # marked down, so that its next response is reported
                    status.up, status.silent = False, False
                    status.problem = f"polling failed: {describe_error(error)}"
                models_due = gauges_due = now() + self._settings.poll_interval_s
                up = False
            wake = min(models_due, gauges_due) if up else models_due
            await asyncio.sleep(max(0.0, wake - now()))

    async def _ask_models(self, base_url: str) -> bool:
        problem = ""
        unreachable = False
        models: tuple[ModelCard, ...] = ()
        alive = self._answered_since_last_poll(base_url)
        try:
            models = tuple(_decode(await self._get(f"{base_url}/v1/models"), _Models).data)
            problem = "" if models else "GET /v1/models: no model"
        except (OSError, _BadAnswerError) as error:
            if is_out_of_descriptors(error):
                # The router's own problem: the known state of the engine stays valid.
                return False
            problem = self._in_words(error)[:_PROBLEM_LENGTH_MAX]
            refused = isinstance(error, NotConnectedError)
            unreachable = not isinstance(error, _BadAnswerError)
            alive = alive or self._answered_since_last_poll(base_url)
            missed = self._missed[base_url] = 0 if alive else self._missed.get(base_url, 0) + 1
            if not isinstance(error, TimeoutError):
                self._not_only_slow.add(base_url)
            for status in self._fleet.ranks(base_url):
                # It answers clients, so it is up again.
                if alive and not refused and status.silent:
                    self._note(status, status.models, "", moved=False)
            up = any(status.up for status in self._fleet.ranks(base_url))
            # A timed-out poll while requests wait longer than expected needs no second one.
            hangs = isinstance(error, TimeoutError) and self._is_overdue(base_url)
            missed_max = 1 if hangs else self._settings.polls_missed_max
            if up and not refused and (alive or missed < missed_max):
                return False  # slow under load, not down
        if models:
            self._missed.pop(base_url, None)
            self._not_only_slow.discard(base_url)
        changed = await self._learn(base_url, models) if models else []
        for status in self._fleet.ranks(base_url):
            if models:
                status.server_info = self._informed.get(base_url)
                status.salt_proof = self._proofs.get(base_url)
            status.unreachable = unreachable
            self._note(status, models, problem, moved=status.engine_id in changed)
        return bool(models)

    def _in_words(self, error: Exception) -> str:
        """Return why there are no models, with the remedy if it is known."""
        if isinstance(error, _BadAnswerError) and error.status in {401, 403}:
            remedy = (
                "the engine does not accept the key of fleet.api_key_file"
                if "authorization" in self._client.headers
                else "the engine wants an API key (--api-key); set fleet.api_key_file"
            )
            return f"{error.status} from /v1/models: {remedy}"
        if isinstance(error, _BadAnswerError) and error.status != 200:
            return f"{error.status} from /v1/models"
        if isinstance(error, NotConnectedError):
            return describe_error(error)
        return f"GET /v1/models: {describe_error(error)}"

    def _note(self, status: E, models: tuple[ModelCard, ...], problem: str, *, moved: bool) -> None:
        was_up, had = status.up, status.models
        status.silent = not models and status.engine.base_url not in self._not_only_slow
        status.up, status.problem = bool(models), problem
        if models:
            same = len(had) == len(models) and all(map(ModelCard.same_as, had, models))
            if not same:
                status.models = models
            if moved or not was_up or not same:
                _log.info("engine up", engine=status.engine_id, models=[card.id for card in models])
                self._listener.engine_up(status)
        elif was_up:
            _log.warning("engine down", engine=status.engine_id, problem=problem)
            self._note_all_silent(status)
            self._listener.engine_down(status)
        elif self._seldom.due(status.engine_id, asyncio.get_running_loop().time()) is not None:
            _log.warning("engine does not answer", engine=status.engine_id, problem=problem)

    def _answered_since_last_poll(self, base_url: str) -> bool:
        """Whether clients received responses since the last poll: its API process may be too busy only for
        polls."""
        answers, before = sum(s.answers for s in self._fleet.ranks(base_url)), self._answers.get(base_url, 0)
        self._answers[base_url] = answers
        return answers > before

    def _is_overdue(self, base_url: str) -> bool:
        return any(status.overdue for status in self._fleet.ranks(base_url))

    def _note_all_silent(self, status: E) -> None:
        """Log once for each model whose last engine went down."""
        for card in status.models:
            ready = self._fleet.ready(card.id)
            if status in ready:
                _log.warning(
                    "no engine of the model answers polls in time; requests still go to those that timed out",
                    model=card.id,
                    engines=len(ready),
                )

    async def _ask_version(self, base_url: str, card: ModelCard) -> None:
        """Query the server's version: another server may have started at the same address."""
        # The Rust frontend counts as another version: engines that tokenize differently must not be paired.
        version: str | None = None
        try:
            version = _decode(await self._get(f"{base_url}/version"), _Version).version
        except OSError:
            return  # repeated at the next poll
        except _BadAnswerError as error:
            if error.status == 200:
                _log.warning("version could not be parsed", server=base_url, problem=str(error))
        if version is not None and card.frontend == "rust":
            version += " (Rust frontend)"
        for status in self._fleet.ranks(base_url):
            status.version = version

    async def _learn(self, base_url: str, models: tuple[ModelCard, ...]) -> list[str]:
        """Ask a server that answers for what its models do not say. Returns the ids whose addresses
        changed."""
        await self._ask_server_info(base_url)
        changed = await self._discover_events(base_url, models)
        # after its ranks are known: new ranks have no version yet
        ranks = self._fleet.ranks(base_url)
        once = self.versions_once and models[0].frontend == "python"
        if (
            self.versions
            or any(status.engine.role for status in ranks)
            or (once and any(one.version is None or not one.up for one in ranks))
        ):
            await self._ask_version(base_url, models[0])
        if self._fleet.needs_salt_proofs:
            await self._look_at_salts(base_url, models)
        return changed

    async def _look_at_salts(self, base_url: str, models: tuple[ModelCard, ...]) -> None:
        """Have the APIs of a server that joins tried before it is up; later, beside its polls, what it did
        not show."""
        if not any(status.up for status in self._fleet.ranks(base_url)) or base_url not in self._proofs:
            proof = self._proofs[base_url] = SaltProof()
            await self._settle_salts(base_url, models, proof)
        elif self._proofs[base_url].again and self._tasks is not None:
            now = asyncio.get_running_loop().time()
            if now >= self._proofs_due.get(base_url, 0.0):
                self._proofs_due[base_url] = math.inf
                proof = self._proofs[base_url]
                self._tasks.create_task(self._settle_salts(base_url, models, proof), name="try salts")

    async def _settle_salts(self, base_url: str, models: tuple[ModelCard, ...], proof: SaltProof) -> None:
        """Take over what another router has found out about the process at this server, or try it."""
        others, tries = self.shared_proofs, proof.tries
        engine_id = next((rank.engine_id for rank in self._fleet.ranks(base_url)), "")
        if others is not None and not tries:
            with contextlib.suppress(OSError, _BadAnswerError):
                proof.started = read_started(await self._get(base_url + METRICS))
        if others is not None and proof.started is not None:
            await others.ask(engine_id, proof)
        if proof.tries == tries:
            await self._prove_salts(base_url, models, proof)
            if others is not None and proof.started is not None:
                await others.tell(engine_id, proof)
        if self._proofs.get(base_url) is proof:  # its server has not left meanwhile
            self._proofs_due[base_url] = asyncio.get_running_loop().time() + proof.pause_s

    def salt_proof(self, engine_id: str) -> SaltProof | None:
        """Return the proof of an engine's server, as far as it goes."""
        status = self._fleet.get(engine_id)
        return None if status is None else self._proofs.get(status.engine.base_url)

    async def _prove_salts(self, base_url: str, models: tuple[ModelCard, ...], proof: SaltProof) -> None:
        ranks = self._fleet.ranks(base_url)
        address = ranks[0].engine if ranks else None
        rank = None if address is None else address.dp_rank
        headers = {"content-type": "application/json"}
        if rank is not None:
            # Each rank has a cache of its own.
            headers["x-data-parallel-rank"] = str(rank)

        async def ask(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
            url = base_url + path
            async with self._client.exchange(method, url, REQUEST_S_MAX, body, headers) as answer:
                return answer.status, await answer.body(ANSWER_BYTES_MAX)

        stated = self._informed.get(base_url)
        with contextlib.suppress(OSError, _BadAnswerError):
            page = await self._get(base_url + METRICS)
            if not proof.tries:
                # Later tries may meet another process, of which what is proven says nothing.
                proof.started = read_started(page)
            stated = read_statement(page, rank) or stated
        kind = kind_of(address, self._informed.get(base_url), models)
        prover = SaltProver(
            ask,
            next((card.id for card in models if card.parent is None), models[0].id),
            kind,
            block_tokens=None if stated is None else stated.attention_block_size,
            tokens_max=models[0].max_model_len,
            caches=stated is None or stated.caches_prefixes is not False,
        )
        known = proof.doubts
        try:
            await prover.prove(proof)
        except Exception as error:  # noqa: BLE001  # whatever an engine answers: nothing is proven by it
            _log.exception("salts could not be tried", server=base_url, problem=describe_error(error))
        for path, one in proof.doubts.items():
            if known.get(path) != one:
                _log.warning("prompts cannot be isolated", server=base_url, path=path, problem=one.why)

    async def _ask_server_info(self, base_url: str) -> None:
        """Query the server's set-up, if it reports it: once for each of its processes."""
        if not any(status.up for status in self._fleet.ranks(base_url)):
            self._informed.pop(base_url, None)
        if base_url in self._informed:
            return
        with contextlib.suppress(OSError):  # repeated at the next poll
            try:
                self._informed[base_url] = server_info_statement(await self._get(base_url + SERVER_INFO))
            except _BadAnswerError:
                self._informed[base_url] = None

    async def _discover_events(self, base_url: str, models: tuple[ModelCard, ...]) -> list[str]:
        """Find ranks and endpoints of the server, unless configured. Returns the ids whose addresses
        changed."""
        configured = self._fleet.configured(base_url)
        if any(engine.events is not None for engine in configured):
            return []
        like = configured[0] if configured else None
        stated = self._informed.get(base_url)
        if kind_of(like, stated, models) == "sglang":
            if base_url not in self._informed:
                return []  # keep the known ranks
            found = sglang_engines(base_url, None if stated is None else stated.event_ports, like)
            return self._fleet.replace(base_url, found or configured)[0]
        if not any(status.up for status in self._fleet.ranks(base_url)):
            self._settled.discard(base_url)
        if base_url in self._settled:
            return []
        found = []
        try:
            body = await self._get(f"{base_url}/kv_event_sources")
            found = event_sources(base_url, body, like)
        except OSError:
            # Keep the known ranks; repeated at the next poll.
            return []
        except _BadAnswerError as error:
            if error.status not in _ABSENT:
                return []
        except ValueError as error:
            _log.warning("event sources could not be parsed", server=base_url, problem=str(error))
            self._settled.add(base_url)
            return []
        if not found:
            self._settled.add(base_url)
        return self._fleet.replace(base_url, found or configured)[0]

    async def _ask_gauges(self, base_url: str) -> None:
        try:
            body = await self._metrics_page(base_url)
        except (OSError, _BadAnswerError):
            return
        started = read_started(body)
        for status in self._fleet.ranks(base_url):
            before, status.started = status.started, started or status.started
            if None not in (started, before) and started != before:
                self._informed.pop(base_url, None)
                self._samples.pop(base_url, None)
                _log.info("engine restarted", engine=status.engine_id)
                proof = self._proofs.get(base_url)
                if proof is None or proof.started != started:
                    # Another release may have started: what was proven of the last one counts no longer.
                    self._proofs.pop(base_url, None)
                    status.salt_proof = None
                    self._restarted.add(base_url)
                self._listener.engine_restarted(status)
            gauges = read_gauges(body, status.engine.dp_rank)
            status.kv_usage = gauges.get("kv_cache_usage_perc")
            status.pool_blocks = read_pool_blocks(body, status.engine.dp_rank)
            status.stated = read_statement(body, status.engine.dp_rank)
            status.obeys_hints = read_obeys_hints(body, status.engine.dp_rank)
            if status.engine.role is not None:
                status.transfers = read_transfers(body, status.engine.dp_rank)
            self._note_sleep(status, read_sleep(body, status.engine.dp_rank))
            if "num_requests_running" in gauges and "num_requests_waiting" in gauges:
                self._listener.engine_load(
                    status,
                    running=int(gauges["num_requests_running"]),
                    waiting=int(gauges["num_requests_waiting"]),
                )

        if base_url in self._restarted and self._fleet.needs_salt_proofs:
            self._restarted.discard(base_url)
            await self._look_at_salts(base_url, self._fleet.ranks(base_url)[0].models)
            for status in self._fleet.ranks(base_url):
                status.salt_proof = self._proofs.get(base_url)

    async def _metrics_page(self, base_url: str) -> bytes:
        """The server's metrics: only what is read, if it gives that by name, else the whole page."""
        there = self._samples.get(base_url)
        if there:
            with contextlib.suppress(_BadAnswerError):
                page = await self._get(base_url + METRICS_BY_NAME)
                if names_read(page) >= there:
                    return page
        page = await self._get(base_url + METRICS)
        # Not by name: several API processes (``MultiProcessCollector``), SGLang, the Rust frontend.
        self._samples[base_url] = names_read(page) if there is None else frozenset()
        return page

    def _note_sleep(self, status: E, found: SleepState) -> None:
        before, status.sleep = status.sleep, found
        was_asleep, status.asleep = status.asleep, found.asleep
        if found.asleep != was_asleep:
            _log.info("engine sleeps" if found.asleep else "engine is awake", engine=status.engine_id)
        released = before is not None and found.releases > before.releases
        if not found.asleep:
            # The level of a call that was missed is unknown: 0 is rare, and too low better than too high.
            if not was_asleep and before is not None and (released or found.sleeps > before.sleeps):
                _log.info("engine slept and woke", engine=status.engine_id)
                self._listener.engine_asleep(status, woke=True)
            return
        was_emptied = was_asleep and before is not None and before.discarded
        if released or before is None or (found.discarded and not was_emptied):
            self._listener.engine_asleep(status, woke=False)

    async def _get(self, url: str) -> bytes:
        async with self._client.exchange("GET", url, self._settings.poll_timeout_s) as answer:
            if answer.status != 200:
                raise _BadAnswerError(f"status {answer.status}", answer.status)
            try:
                return await answer.body(ANSWER_BYTES_MAX)
            except TooLongError as error:
                raise _BadAnswerError(str(error)) from None


class _BadAnswerError(Exception):
    """A server answered with something else than requested. ``status`` 200: an unusable body."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except _BAD_JSON as error:
        raise _BadAnswerError(describe_error(error)) from None
