"""The usage record: one JSON line for every request, for bills, audits and what-if runs. No text, no keys.

The event loop appends a finished request to a bounded queue; a thread of its own hashes prefixes, writes in
batches, rotates and syncs. Invariants: a request is never delayed or failed by its record; the queue, a
batch and the files are bounded; a line is written once and whole, and what is lost is counted by reason.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from kvatlas.publisher.block_hash import PromptExtras
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.observe.prefix_ids import START_UNIT_TOKENS, UNIT_TOKENS, prefix_ids, read_key
from kvatlas.router.observe.receipts import DRIFT_MIN, DRIFT_SHARE, WINDOW
from kvatlas.router.observe.requests import Certainty, RequestRecord
from kvatlas.router.observe.traces import TraceSettings
from kvatlas.router.observe.usage_export import UsageExport, UsageExportStats
from kvatlas.router.openai.request import Usage
from kvatlas.router.openai.work import NO_WORK, Work

_log = structlog.get_logger()
WRITE_INTERVAL_S = 0.2
FSYNC_INTERVAL_S = 1.0
"""Between writing a line and its `fsync`: the loss if the machine loses power."""
QUEUE_LEN_MAX = 8192
"""Requests waiting to be written: seconds of a busy router; further ones are not recorded, and counted."""
QUEUE_TOKENS_MAX = 8 << 20
"""Prompt tokens waiting to be written: 64 MB of them."""
COMPLAIN_INTERVAL_S = 60.0
CLOSE_S_MAX = 5.0
_BATCH_BYTES = 1 << 18
_PIECE_BYTES = 1 << 18
_TAIL_BYTES = 1 << 16
_ROTATED = re.compile(r"\.(\d{1,6})")


class UsageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Writes a line for every request: client, engine, tokens by tier, times. No text.

    Files are ``path`` and the older ``path.1``, ``path.2`` and so on. Every router needs its own ``path``;
    files of routers with the same ``key_file`` can be read together. Each of several workers writes its own
    files: from the second worker on, ``.worker1``, ``.worker2`` and so on is appended to ``path``.
    """

    path: str = ""
    """File to append to; empty: no usage record. Set it for billing, or for `kvatlas simulate` and `advise`
    with your own load."""
    file_bytes_max: int = 64 << 20
    """Size at which a file is rotated, of all workers' files together; a line takes about 950 bytes, and 17
    more per 512 tokens of its prompt. Set it to what your log shipper takes in one piece."""
    files_max: int = 16
    """Most files kept, the current one included; the oldest is removed by a rotation, and counted. Raise it
    to keep the days that you bill."""
    key_file: str = ""
    """File with the secret of the prefix hashes, made if missing; empty: `path` with `.key` appended. Set it
    if several routers' files are read together."""


class UsageStats(msgspec.Struct):
    """Counters for metrics."""

    written: Annotated[int, "kvatlas_usage_written_total"] = 0
    """Lines written."""
    dropped: Annotated[dict[str, int], "kvatlas_usage_dropped_total{reason}"] = msgspec.field(
        default_factory=lambda: {"queue_full": 0, "not_writable": 0}
    )
    """Requests without a line: the queue was full, or the disk failed, or they were left at exit."""
    write_failures: Annotated[int, "kvatlas_usage_write_failures_total"] = 0
    """Attempts to write that failed (disk full, no permission); the lines are kept and tried again."""
    fsync_failures: Annotated[int, "kvatlas_usage_fsync_failures_total"] = 0
    """Calls of fsync that failed."""
    rotations: Annotated[int, "kvatlas_usage_rotations_total"] = 0
    """Times the file reached its size and a new one was started."""
    files_removed: Annotated[int, "kvatlas_usage_files_removed_total"] = 0
    """Oldest files removed because there were `usage.files_max`."""
    unverified: Annotated[int, "kvatlas_usage_unverified_total"] = 0
    """Lines with `verified: false`."""
    queued: Annotated[int, "kvatlas_usage_queued"] = 0
    """Requests waiting to be written."""


class PlacementFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Facts known when a request was placed, in tokens. ``tokens`` and ``extras`` describe the prompt if it
    was tokenized here and is the only one of its request."""

    tokens: array[int] | None = None
    extras: PromptExtras | None = None
    mode: str = ""
    predicted_tokens: int | None = None
    host_tokens: int = 0
    store_tokens: int = 0
    queue_s: float | None = None
    predicted_ttft_s: float | None = None
    prefill_engine: str = ""
    work: Work | None = None


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line as written. Seconds after ``arrived_s``; None: unknown, or it did not happen."""

    arrived_s: float
    """Time of arrival, by the wall clock."""
    request_id: str
    key: str
    """First digits of the SHA-256 of the client's key, as ``kvatlas keys list`` shows them."""
    tenant: str
    session: str = ""
    """Session as named by the client; "" without one."""
    agent: str = ""
    """Sub-agent within the session."""
    model: str
    method: str
    path: str
    engine: str
    """The engine that answered, or that got the last attempt."""
    prefill_engine: str
    """The engine that computed the prompt for it, if another one did."""
    attempts: int
    """Number of attempts."""
    status: int
    """HTTP status; 0: the client left before there was one, or a gateway did not show it."""
    outcome: str
    """The status, or ``client_gone``, ``broken_stream``, ``unseen``."""
    stream: bool
    prompt_tokens: int | None
    """Prompt tokens as reported by the engine."""
    cached_tokens: int | None
    """Cached tokens as reported by the engine: the sum of the next three."""
    device_tokens: int | None
    host_tokens: int | None
    store_tokens: int | None
    computed_tokens: int | None
    """Prompt tokens. With keys, those charged to the tenant."""
    generated_tokens: int | None
    """Tokens that were generated, as reported; of a stream without a report, those that passed."""
    predicted_tokens: int | None
    """Prediction of ``cached_tokens`` by the index."""
    mode: str
    """Mode of the prediction."""
    verified: bool | None
    """Whether both are equal; None also for mode ``partial``, which says nothing of the report, and for
    several prompts or answers, of which engines report the cached tokens of one."""
    waited_s: float
    """Time in the router's queue."""
    asked_s: float | None
    """Time at which the request was sent to the engine."""
    first_token_s: float | None
    """Time of the first token; streams only."""
    duration_s: float
    queue_s: float | None
    """Predicted wait in the engine's queue at that time."""
    predicted_ttft_s: float | None
    """Predicted seconds from ``asked_s`` to the first token."""
    continued_from: str = ""
    """Engine whose stream broke, where ``engine`` went on with it; "": none."""
    recomputed_tokens: int = 0
    """Tokens of prompt and answer that ``engine`` computed for that; not in ``computed_tokens``."""
    computed_is: Certainty | None = None
    """How sure ``computed_tokens`` is: ``measured`` by the engine's report, else ``estimated``."""
    generated_is: Certainty | None = None
    """How sure ``generated_tokens`` is: ``measured``, ``counted`` as they passed, or ``estimated``."""
    hashed_tokens: int | None
    """Prompt tokens that ``hash_ids`` stand for."""
    hash_ids: list[int] | None
    """One id per 512 tokens, if the prompt was tokenized here."""
    start_ids: list[int] | None = None
    """Then, one id per 32 tokens of the first 512."""


class UsageLog:
    """Writes from ``start`` to ``close``; ``add`` may be called at any time, from one thread."""

    def __init__(self, settings: UsageSettings, traces: TraceSettings | None = None) -> None:
        self.stats = UsageStats()
        self.export_stats = UsageExportStats()
        self._traces = traces if traces is not None and traces.endpoint else None
        """Also receives lines, over OTLP."""
        self._export: UsageExport | None = None
        self.worker_paths: list[Path] = []
        """Files of other workers, which ``read_back`` includes."""
        self._settings = settings
        self._path = Path(settings.path)
        self._key_path = Path(settings.key_file or f"{settings.path}.key")
        self._key = b""
        self._queue: deque[tuple[RequestRecord, PlacementFacts | None, float, float]] = deque()
        # Total put into the queue; written only by the event loop's thread.
        self._tokens_in = 0
        # Total taken out; written only by the writer's thread.
        self._tokens_out = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: FileIO | None = None
        self._failing = False
        self._compared, self._unverified = 0, 0.0
        self._batch: list[bytes] = []
        """Encoded lines not written yet."""
        self._synced_s = 0.0
        self._unsynced = False
        self._complaints = LogThrottle(COMPLAIN_INTERVAL_S)
        self._encoder = msgspec.json.Encoder()

    def start(self) -> None:
        """Start to write."""
        self._closing.clear()
        if self._traces is not None:
            self._export = UsageExport(self._traces, self.export_stats)
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the queue, sync and stop; waits for a hanging disk for at most ``CLOSE_S_MAX``."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
            self._thread = None
        export, self._export = self._export, None
        if export is not None:
            export.close()

    def add(self, record: RequestRecord, now: float) -> None:
        """Queue the record of an ended request. Never waits."""
        facts = record.placement_facts()
        weight = _weight(facts)
        waiting = self._tokens_in - self._tokens_out
        if len(self._queue) >= QUEUE_LEN_MAX or waiting + weight > QUEUE_TOKENS_MAX:
            self.stats.dropped["not_writable" if self._failing else "queue_full"] += 1
            return
        self._tokens_in += weight
        duration_s = now - record.arrived_s
        self._queue.append((record, facts, time.time() - duration_s, duration_s))
        self.stats.queued = len(self._queue)

    def read_back(self) -> Iterator[bytes]:
        """Yield the content of the files, oldest first, in pieces. Reads from disk."""
        for path in [file for log in (self._path, *self.worker_paths) for file in rotated_files(log)]:
            try:
                with path.open("rb") as file:
                    left = os.fstat(file.fileno()).st_size
                    while left > 0 and (piece := file.read(min(_PIECE_BYTES, left))):
                        left -= len(piece)
                        yield piece
            except FileNotFoundError:  # rotated meanwhile
                continue

    def _run(self) -> None:
        closing = False
        while not closing:
            # first, so that everything queued before is written
            closing = self._closing.wait(WRITE_INTERVAL_S)
            try:
                self._write_all()
                self._failing = False
            except OSError as error:
                self._failing = True
                self.stats.write_failures += 1
                self._close_file()
                self._complain("usage record not written", error)
            self._sync(force=closing)
        self._close_file()
        self.stats.dropped["not_writable"] += len(self._batch) + len(self._queue)
        self._batch.clear()
        while self._queue:
            self._tokens_out += _weight(self._queue.popleft()[1])
        self.stats.queued = 0

    def _write_all(self) -> None:
        """Write the batch. Raises ``OSError`` and keeps the batch then."""
        if not self._key and (self._queue or self._batch):
            self._key = read_key(self._key_path)
        while self._batch or self._queue:
            size = sum(map(len, self._batch))
            while self._queue and size < _BATCH_BYTES:
                record, facts, arrived_s, duration_s = self._queue.popleft()
                self._tokens_out += _weight(facts)
                line = usage_line(record, facts, arrived_s, duration_s, self._key)
                if line.verified is not None:
                    self._compare(line.verified)
                self._batch.append(self._encoder.encode(line) + b"\n")
                size += len(self._batch[-1])
                if self._export is not None:
                    self._export.send(line, line.arrived_s)
            self.stats.queued = len(self._queue)
            while self._batch:
                self._write_batch()

    def _compare(self, verified: bool) -> None:
        self.stats.unverified += not verified
        self._compared += 1
        weight = 1 / min(self._compared, WINDOW)
        self._unverified += weight * ((not verified) - self._unverified)

    @property
    def failing(self) -> bool:
        """Whether the latest attempt to write failed."""
        return self._failing

    @property
    def unverified_share(self) -> float:
        """Share of about the latest ``WINDOW`` lines that do not agree with the index, if it is too large."""
        known = self._compared >= DRIFT_MIN and self._unverified > DRIFT_SHARE
        return self._unverified if known else 0.0

    def _write_batch(self) -> None:
        """Write as many lines of the batch as the file takes. Raises ``OSError``."""
        if self._file is None:
            self._file = _open_whole(self._path)
        size = self._file.tell()
        room = self._settings.file_bytes_max - size
        if size and len(self._batch[0]) > room:
            self._rotate()
            return
        count = taken = 0
        for line in self._batch:
            if count and taken + len(line) > room:
                break
            taken += len(line)
            count += 1
        if self._file.write(b"".join(self._batch[:count])) != taken:
            # A partial line would corrupt the next one.
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._unsynced = True
        self.stats.written += count
        del self._batch[:count]

    def _rotate(self) -> None:
        self._sync(force=True)
        self._close_file()
        last = self._settings.files_max - 1
        for path in rotated_files(self._path):  # oldest first
            number = int(path.name.rpartition(".")[2]) if path != self._path else 0
            if number >= last:
                path.unlink(missing_ok=True)
                self.stats.files_removed += 1
            else:
                path.replace(f"{self._path}.{number + 1}")
        self.stats.rotations += 1

    def _sync(self, *, force: bool) -> None:
        now = time.monotonic()
        due = force or now - self._synced_s >= FSYNC_INTERVAL_S
        if self._file is None or not self._unsynced or not due:
            return
        self._synced_s, self._unsynced = now, False
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.stats.fsync_failures += 1
            self._complain("usage record not synced", error)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._complain("usage record not closed", error)

    def _complain(self, event: str, error: OSError) -> None:
        if self._complaints.due("", time.monotonic()) is not None:
            _log.warning(event, setting="usage.path", path=str(self._path), problem=str(error))


def usage_line(
    record: RequestRecord, facts: PlacementFacts | None, arrived_s: float, duration_s: float, key: bytes
) -> UsageLine:
    """Return the line of an ended request."""
    facts = _NO_FACTS if facts is None else facts
    usage, tokens = record.usage, facts.tokens
    prompt, cached, predicted = None, None, facts.predicted_tokens
    if usage is not None:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
    device, host, store = _by_tier(cached, facts)
    computed = record.charged_tokens
    many = facts.work is not None and facts.work.sequences > 1
    if computed is None and usage is not None and (cached is not None or many):
        computed = (facts.work or NO_WORK).computed(usage)
    elif (
        computed is None
        and facts.work is not None
        and record.served
        and (usage is None or record.continued_from)
    ):
        computed = facts.work.uncached_tokens
    # Of several prompts or answers the engine reports one.
    unlike = many or facts.mode == "partial"
    ids = start_ids = None
    if tokens is not None and facts.extras is not None:
        ids = prefix_ids(tokens, record.model, facts.extras, key)
        start = tokens[:UNIT_TOKENS]
        start_ids = prefix_ids(start, record.model, facts.extras, key, START_UNIT_TOKENS)
    return UsageLine(
        arrived_s=round(arrived_s, 6),
        request_id=record.request_id,
        key=record.key_id,
        tenant=record.tenant,
        **record.session_fields(),
        model=record.model,
        method=record.method,
        path=record.path,
        engine=record.engine,
        prefill_engine=facts.prefill_engine,
        attempts=record.attempts,
        status=record.status,
        outcome=record.outcome,
        stream=record.streams,
        prompt_tokens=prompt,
        cached_tokens=cached,
        device_tokens=device,
        host_tokens=host,
        store_tokens=store,
        computed_tokens=computed,
        generated_tokens=record.generated_tokens,
        computed_is=_computed_is(computed, usage, many=many),
        generated_is=record.generated_is,
        continued_from=record.continued_from,
        recomputed_tokens=record.recomputed_tokens,
        predicted_tokens=predicted,
        mode=facts.mode,
        verified=None if unlike or None in (predicted, cached) else predicted == cached,
        waited_s=round(record.waited_s, 6),
        asked_s=_since(record.asked_s, record.arrived_s),
        first_token_s=_since(record.first_s, record.arrived_s),
        duration_s=round(duration_s, 6),
        queue_s=_rounded(facts.queue_s),
        predicted_ttft_s=_rounded(facts.predicted_ttft_s),
        hashed_tokens=None if ids is None or tokens is None else len(tokens),
        hash_ids=ids,
        start_ids=start_ids,
    )


def rotated_files(path: Path) -> list[Path]:
    """Return a record's files, oldest first; ``path`` itself last, even if it does not exist."""
    found: list[tuple[int, Path]] = []
    if path.parent.is_dir():
        for other in path.parent.iterdir():
            if other.name.startswith(f"{path.name}."):
                number = _ROTATED.fullmatch(other.name, len(path.name))
                if number is not None:
                    found.append((int(number[1]), other))
    return [*(file for _, file in sorted(found, reverse=True)), path]


_NO_FACTS = PlacementFacts()


def _computed_is(computed: int | None, usage: Usage | None, *, many: bool) -> Certainty | None:
    if computed is None or (usage is None and not computed):
        return None
    return "estimated" if usage is None or usage.cached_tokens is None or many else "measured"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _since(moment_s: float | None, arrived_s: float) -> float | None:
    return None if moment_s is None else round(moment_s - arrived_s, 6)


def _by_tier(cached: int | None, facts: PlacementFacts) -> tuple[int | None, int | None, int | None]:
    """Split the reported sum by tier. A hit is taken from the device first, then from host memory, then from
    a store (vLLM v1/core/sched/scheduler.py queries the connector for what follows the local hit). So a sum
    below the prediction lacks the farthest tier, and an excess counts as the device's."""
    if cached is None:
        return None, None, None
    device = (facts.predicted_tokens or 0) - facts.host_tokens - facts.store_tokens
    host = min(facts.host_tokens, max(0, cached - device))
    store = min(facts.store_tokens, max(0, cached - device - host))
    return cached - host - store, host, store


def _weight(facts: PlacementFacts | None) -> int:
    """Return its size in tokens of four bytes each: the length of cache salts is up to clients."""
    if facts is None or facts.tokens is None:
        return 0
    extras = facts.extras
    size = len(facts.tokens)
    if extras is None:
        return size
    if extras.cache_salt:
        size += len(extras.cache_salt)
    for item in extras.multimodal:
        size += len(item.identifier)
    return size


def _open_whole(path: Path) -> FileIO:
    """Open to append, without a partial line left by a crash."""
    file = FileIO(path, "a+", opener=lambda name, flags: os.open(name, flags, 0o600))
    end = size = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(end)
    return file
