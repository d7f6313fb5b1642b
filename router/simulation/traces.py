"""Recorded workloads: traces with one JSON line per request, session files, and the router's usage record.

Traces have Mooncake's format with any block size, or AIPerf's rows of sessions. Every row has
``input_length`` and ``output_length``. ``hash_ids`` has one id per unit of the prompt, with or without one
for the rest; the tokens per id are inferred from all rows, which must agree. A file without ids is read too:
each prompt is then unique, except that a turn of a session that is at least as long as the previous turn with
its answer continues it.

A row arrives at its ``timestamp`` (ms). In a session (``session_id``) only the first row needs one: a turn
without one arrives ``delay`` ms after the previous answer (open replay: after the previous arrival), and
sessions without any start ``ROW_S`` apart per row of the file.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.observe.usage import UsageLine, rotated_files
from kvatlas.router.simulation.requests import (
    TOKENS_MAX,
    Asked,
    Follows,
    WorkloadError,
    asked_of,
    count_of,
    ids_of,
    in_order,
    lines_of,
    milliseconds_of,
    seconds_of,
)
from kvatlas.router.simulation.setup import Timing

# Session files: one JSON object per recorded agent session, in the format of kv-cache-tester.
#
# ``requests`` have ``t`` (s from the session's start), ``in`` and ``out`` (tokens) and ``hash_ids``, one per
# ``block_size`` tokens of the prompt, with or without one for the rest. Ids are local to a session. Entries
# of ``type`` "subagent" have ``requests`` of their own, whose times count from the session's start, or from
# the entry's ``t`` if they begin before it.
#
# Content shared between sessions is recorded only by its length: tool definitions of ``tool_tokens`` count as
# equal in all sessions with the same length, and system prompts of ``system_tokens`` after equal tools too.
#
# Sessions start evenly over the duration of the longest one. In closed replay a turn follows the previous one
# of its list, after ``think_time`` if recorded, else after the gap less ``api_time``; a sub-agent starts
# beside the latest earlier request of its parent.


FILE_BYTES_MAX = 256 << 20
FILES_MAX = 10_000
ENDINGS = (".json", ".json.gz")
_EXPECTED_SESSION = (
    'expected a session: {"block_size": 64, "requests": [{"t": 0.0, "in": 900, "out": 9, "hash_ids": [..]}]}'
)


def is_session(path: Path) -> bool:
    """Whether a path is a folder, or a JSON file that is not a list of requests by lines."""
    if path.is_dir() or not path.name.endswith(ENDINGS):
        return path.is_dir()
    try:
        with contextlib.closing(lines_of(path)) as lines:
            _, fields = next(lines)
    except WorkloadError:
        # A session over several lines, or an error that its reader reports.
        return True
    return not {"input_length", "payload_b64"} & fields.keys()


def read_sessions(paths: Sequence[Path]) -> list[Asked]:
    """Return the requests of session files, and of those in folders, by time. Raises ``WorkloadError``."""
    files: list[Path] = []
    for path in paths:
        inside = (
            sorted(one for one in path.iterdir() if one.name.endswith(ENDINGS)) if path.is_dir() else [path]
        )
        if not inside:
            raise WorkloadError(f"{path}: no session files in it (*.json, *.json.gz)")
        files += inside
    if len(files) > FILES_MAX:
        raise WorkloadError(f"{len(files)} session files: expected at most {FILES_MAX}")
    joined = _Joined()
    for file in files:
        joined.add(_object(file), str(file))
    return in_order(joined.spread())


def _object(path: Path) -> dict[str, Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise WorkloadError(f"{path}: the file does not exist") from None
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: {error}") from None
    if len(data) > FILE_BYTES_MAX:
        raise WorkloadError(f"{path}: more than {FILE_BYTES_MAX} bytes; {_EXPECTED_SESSION}")
    try:
        found = json.loads(data)
    except ValueError as error:
        raise WorkloadError(f"{path}: not one JSON object: {error}; {_EXPECTED_SESSION}") from None
    if not isinstance(found, dict):
        raise WorkloadError(f"{path}: a JSON {type(found).__name__}; {_EXPECTED_SESSION}")
    if not isinstance(found.get("requests"), list) or not found["requests"]:
        raise WorkloadError(f"{path}: fields {', '.join(list(found)[:12]) or 'none'}; {_EXPECTED_SESSION}")
    return found


class _Joined:
    """Sessions merged into one workload; every block of tokens has one id in all of them."""

    def __init__(self) -> None:
        self._unit: int | None = None
        self._found: list[Asked] = []
        self._starts: list[int] = []
        self._ids: dict[tuple[object, ...], int] = {}
        self._fresh = itertools.count()
        self._lists = itertools.count()

    def add(self, fields: dict[str, Any], where: str) -> None:
        unit = count_of(fields, "block_size", where, least=1)
        if self._unit not in (None, unit):
            raise WorkloadError(f"{where}: block_size = {unit}: the files before have {self._unit}")
        self._unit = unit
        self._starts.append(len(self._found))
        scope = "all" if fields.get("hash_id_scope") == "global" else where
        entries = _entries(fields, where)
        main = [(name, one) for name, one in entries if one.get("type") != "subagent"]
        parents = self._list(main, fields, scope, where, base_s=0.0, parents=[])
        for name, entry in entries:
            if entry.get("type") == "subagent":
                began_s = seconds_of(entry, "t", name)
                inside = _entries(entry, name)
                first_s = min(seconds_of(one, "t", at) for at, one in inside)
                base_s = began_s if first_s < began_s else 0.0
                self._list(inside, entry, scope, name, base_s=base_s, parents=parents)

    def spread(self) -> list[Asked]:
        """Return all requests, with the sessions' starts spread."""
        ends = [*self._starts[1:], len(self._found)]
        parts = [self._found[start:end] for start, end in zip(self._starts, ends, strict=True)]
        longest_s = max(one.at_s for one in self._found)
        return [
            msgspec.structs.replace(one, at_s=one.at_s + longest_s * place / len(parts))
            for place, part in enumerate(parts)
            for one in part
        ]

    def _list(
        self,
        entries: list[tuple[str, dict[str, Any]]],
        head: dict[str, Any],
        scope: str,
        where: str,
        *,
        base_s: float,
        parents: list[int],
    ) -> list[int]:
        """Add one agent's requests; returns their positions."""
        number, unit = next(self._lists), self._unit or 1
        self._share(entries, head, scope, where, unit)
        places: list[int] = []
        before: dict[str, Any] | None = None
        for name, entry in entries:
            at_s = base_s + seconds_of(entry, "t", name)
            follows = None
            if before is not None:
                gap_s = at_s - self._found[places[-1]].at_s
                follows = Follows(
                    request=places[-1], gap_s=gap_s, think_s=_think_s(before, entry, gap_s, name)
                )
            elif beside := [place for place in parents if self._found[place].at_s <= at_s]:
                gap_s = at_s - self._found[beside[-1]].at_s
                follows = Follows(request=beside[-1], gap_s=gap_s, answered=False)
            tokens = count_of(entry, "in", name, least=1)
            places.append(len(self._found))
            self._found.append(
                Asked(
                    at_s=at_s,
                    input_tokens=tokens,
                    output_tokens=count_of(entry, "out", name, least=0),
                    ids=self._prompt(entry, tokens, unit, scope, name),
                    session=number,
                    unit_tokens=unit,
                    follows=follows,
                )
            )
            before = entry
        return places

    def _share(
        self,
        entries: list[tuple[str, dict[str, Any]]],
        head: dict[str, Any],
        scope: str,
        where: str,
        unit: int,
    ) -> None:
        """Share the blocks of tools and system prompt, with which the first prompt begins, with other
        sessions."""
        if not entries or scope == "all":
            return
        tools = count_of(head, "tool_tokens", where, least=0) if "tool_tokens" in head else 0
        system = count_of(head, "system_tokens", where, least=0) if "system_tokens" in head else 0
        name, first = entries[0]
        for place, local in enumerate(ids_of(first, name)[: (tools + system) // unit]):
            key = ("tools", tools, place) if place < tools // unit else ("system", tools, system, place)
            if key not in self._ids:
                self._ids[key] = next(self._fresh)
            self._ids.setdefault((scope, local), self._ids[key])

    def _prompt(
        self, entry: dict[str, Any], tokens: int, unit: int, scope: str, where: str
    ) -> tuple[int, ...]:
        local = ids_of(entry, where)
        if len(local) not in {tokens // unit, -(-tokens // unit)}:
            raise WorkloadError(
                f"{where}: hash_ids: {len(local)} ids for in = {tokens}; expected one per {unit} tokens, so "
                f"{tokens // unit}"
            )
        for one in local:
            if (scope, one) not in self._ids:
                self._ids[scope, one] = next(self._fresh)
        ids = tuple(self._ids[scope, one] for one in local)
        return ids if len(ids) * unit >= tokens else (*ids, next(self._fresh))


def _entries(fields: dict[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a list of requests by time, each with its position."""
    found = fields.get("requests")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise WorkloadError(f"{where}: requests: expected a list of JSON objects")
    named = [(f"{where}: requests[{place}]", one) for place, one in enumerate(found)]
    return sorted(named, key=lambda pair: seconds_of(pair[1], "t", pair[0]))


def _think_s(before: dict[str, Any], entry: dict[str, Any], gap_s: float, where: str) -> float | None:
    if entry.get("think_time") is not None:
        return seconds_of(entry, "think_time", where)
    if before.get("api_time") is not None:
        return max(0.0, gap_s - seconds_of(before, "api_time", where))
    return None


# Traces with one JSON line per request.


ROW_S = 0.3
# Unit of generated ids, if a trace has none.
OWN_UNIT_TOKENS = 64
_EXPECTED = (
    "expected input_length and output_length, timestamp (ms) or session_id (and delay, ms), and hash_ids "
    "where prompts share prefixes"
)


class _Row(NamedTuple):
    where: str
    input_tokens: int
    output_tokens: int
    ids: list[int] | None
    at_s: float | None
    session: str | int | None
    delay_s: float | None


class UnitRange(NamedTuple):
    """Numbers of tokens per id that all rows allow: ``low`` to ``high``, empty if there is none."""

    low: int = 1
    high: int = TOKENS_MAX

    def __bool__(self) -> bool:
        return self.low <= self.high

    def with_tail(self, tokens: int, ids: int) -> UnitRange:
        """Restrict it by a row whose last id represents the rest of the prompt."""
        if not ids:
            return UnitRange(1, 0)
        high = -(-tokens // (ids - 1)) - 1 if ids > 1 else self.high
        return UnitRange(max(self.low, -(-tokens // ids)), min(self.high, high))

    def whole_only(self, tokens: int, ids: int) -> UnitRange:
        """Restrict it by a row without an id for the rest of the prompt."""
        high = tokens // ids if ids else self.high
        return UnitRange(max(self.low, tokens // (ids + 1) + 1), min(self.high, high))

    @property
    def best(self) -> int:
        """Return Mooncake's own unit if the rows allow it, else a power of two, else the largest."""
        if self.low <= UNIT_TOKENS <= self.high:
            return UNIT_TOKENS
        power = 1 << (self.high.bit_length() - 1)
        return power if power >= self.low else self.high


def read(path: Path) -> list[Asked]:
    """Return the requests of a file (``.gz`` or plain), by time, which starts with the first of them.

    Raises ``WorkloadError``, naming the line, what was found and what is expected.
    """
    rows: list[_Row] = []
    tailed, whole = UnitRange(), UnitRange()
    for where, fields in lines_of(path):
        row = _row(fields, where)
        rows.append(row)
        if (row.ids is None) != (rows[0].ids is None):
            has = "none" if row.ids is None else "some"
            raise WorkloadError(f"{where}: hash_ids: {has} here, unlike the first line; either all or none")
        if row.ids is not None:
            if "block_size" in fields:
                size = count_of(fields, "block_size", where, least=1)
                tailed = UnitRange(max(tailed.low, size), min(tailed.high, size))
                whole = UnitRange(max(whole.low, size), min(whole.high, size))
            before = tailed or whole
            tailed = tailed.with_tail(row.input_tokens, len(row.ids))
            whole = whole.whole_only(row.input_tokens, len(row.ids))
            if not tailed and not whole:
                raise WorkloadError(_disagrees(row, len(row.ids), before, first=len(rows) == 1))
    if rows[0].ids is None:
        return in_order(_asked(rows, _own_ids(rows), OWN_UNIT_TOKENS))
    unit = (tailed or whole).best
    return in_order(_asked(rows, _with_tails(rows, unit), unit))


def _row(fields: dict[str, Any], where: str) -> _Row:
    if "input_length" not in fields:
        names = ", ".join(list(fields)[:12]) or "none"
        raise WorkloadError(f"{where}: not a request of a known format: fields {names}; {_EXPECTED}")
    tokens = count_of(fields, "input_length", where, least=1)
    output = count_of(fields, "output_length", where, least=0)
    ids = ids_of(fields, where) if "hash_ids" in fields else None
    session = fields.get("session_id")
    if session is not None and (isinstance(session, bool) or not isinstance(session, str | int)):
        raise WorkloadError(f"{where}: session_id = {session!r}: expected a text or a whole number")
    at_s = delay_s = None
    if session is None or "timestamp" in fields:
        at_s = milliseconds_of(fields, "timestamp", where)
    if fields.get("delay") is not None:
        delay_s = milliseconds_of(fields, "delay", where)
    return _Row(where, tokens, output, ids, at_s, session, delay_s)


def _disagrees(row: _Row, ids: int, before: UnitRange, *, first: bool) -> str:
    unit = before.best
    told = "" if first else ", as in the lines before"
    return (
        f"{row.where}: hash_ids: {ids} ids for input_length = {row.input_tokens}; expected one per {unit} "
        f"tokens, so {-(-row.input_tokens // unit)}{told}"
    )


def _asked(rows: list[_Row], ids: list[tuple[int, ...]], unit: int) -> list[Asked]:
    """Return the requests with times and previous turns, in the order of the file."""
    sessions: dict[str | int, int] = {}
    last: dict[str | int, int] = {}
    found: list[Asked] = []
    for place, (row, own) in enumerate(zip(rows, ids, strict=True)):
        before = None if row.session is None else last.get(row.session)
        at_s, follows = row.at_s, None
        if at_s is None:
            at_s = ROW_S * place if before is None else found[before].at_s + (row.delay_s or 0.0)
        if before is not None:
            gap_s = at_s - found[before].at_s
            if gap_s < 0:
                raise WorkloadError(f"{row.where}: timestamp: before that of the session's previous turn")
            think_s = 0.0 if row.at_s is None and row.delay_s is None else row.delay_s
            follows = Follows(request=before, gap_s=gap_s, think_s=think_s)
        session = None
        if row.session is not None:
            last[row.session] = place
            session = sessions.setdefault(row.session, len(sessions))
        found.append(
            Asked(
                at_s=at_s,
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                ids=own,
                session=session,
                unit_tokens=unit,
                follows=follows,
            )
        )
    return found


def _with_tails(rows: list[_Row], unit: int) -> list[tuple[int, ...]]:
    """Add an id for the rest of a prompt that has none."""
    own = max((max(row.ids) for row in rows if row.ids), default=0) + 1
    found = []
    for row in rows:
        ids = tuple(row.ids or ())
        if len(ids) * unit < row.input_tokens:
            ids, own = (*ids, own), own + 1
        found.append(ids)
    return found


def _own_ids(rows: list[_Row]) -> list[tuple[int, ...]]:
    streams: dict[str | int, tuple[int, list[int]]] = {}
    fresh = 0
    found = []
    for row in rows:
        tokens, chain = (0, []) if row.session is None else streams.get(row.session, (0, []))
        shared = chain if row.input_tokens >= tokens else []
        total = row.input_tokens + row.output_tokens
        more = -(-total // OWN_UNIT_TOKENS) - len(shared)
        stream = [*shared, *range(fresh, fresh + more)]
        fresh += more
        found.append(tuple(stream[: -(-row.input_tokens // OWN_UNIT_TOKENS)]))
        if row.session is not None:
            streams[row.session] = total, stream[: total // OWN_UNIT_TOKENS]
    return found


# The usage record of a router (``kvatlas.router.observe.usage``) as a workload.
#
# Only requests whose prompts were tokenized by the router and answered by an engine are used. If the engine
# did not report the number of generated tokens, it is estimated from the duration of the answer, at the pace
# of the answers that report both. A rotated record is read completely.


OUTPUT_GUESS_MAX = 32_768
_SUCCESS = 200, 300


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One line. ``asked.output_tokens`` is estimated if ``output_reported`` is False."""

    asked: Asked
    model: str
    engine: str
    output_reported: bool
    predicted_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float
    queue_s: float

    @property
    def s_per_generated_token(self) -> float | None:
        """Return the time per token between the first and the last one; None if unknown."""
        more = self.asked.output_tokens - 1
        if not self.output_reported or self.ttft_s is None or more < 1:
            return None
        return max(0.0, self.duration_s - self.ttft_s) / more


def is_capture(path: Path) -> bool:
    """Whether the first line of a file is one of a usage record. Raises ``WorkloadError``."""
    if is_session(path):
        return False
    with contextlib.closing(lines_of(path)) as lines:
        _, fields = next(lines)
    if "payload_b64" in fields:
        raise WorkloadError(
            f"{path}: a capture of KV events (kvatlas record), which holds no requests; name the router's "
            "usage record (usage.path), or a trace"
        )
    return "arrived_s" in fields and "hash_ids" in fields


def read_capture(path: Path, model: str | None = None) -> list[Captured]:
    """Return all lines of a capture, by time. ``model``: only requests of that one.

    Raises ``WorkloadError``, also for a capture of several models without ``model``: they do not share
    engines' caches.
    """
    lines = (line for piece in rotated_files(path) for line in lines_of(piece))
    found = [one for where, fields in lines if (one := _captured(fields, where)) is not None]
    if not found:
        raise WorkloadError(f"{path}: no answered request whose prompt the router tokenized")
    models = Counter(one.model for one in found)
    if model is not None and model not in models:
        raise WorkloadError(f"{path}: no request of model {model!r}; there are {', '.join(models)}")
    if model is None and len(models) > 1:
        raise WorkloadError(
            f"{path}: requests of {len(models)} models, {', '.join(models)}: name one of them"
        )
    found = [one for one in found if model in {None, one.model}]
    found.sort(key=lambda one: one.asked.at_s)
    return _with_outputs(found)


def asked_in(captured: Sequence[Captured]) -> list[Asked]:
    return in_order([one.asked for one in captured])


def _captured(fields: dict[str, Any], where: str) -> Captured | None:
    """Parse a line; None if nothing was computed, or the prompt is unknown."""
    try:
        line = msgspec.convert(fields, UsageLine)
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{where}: not a line of a usage record: {error}") from None
    if line.hash_ids is None or line.asked_s is None or not _SUCCESS[0] <= line.status < _SUCCESS[1]:
        return None
    generated = line.generated_tokens
    asked = asked_of(
        {
            "timestamp": 1000 * (line.arrived_s + line.asked_s),
            "input_length": line.hashed_tokens,
            "output_length": generated or 0,
            "hash_ids": line.hash_ids,
        },
        where,
    )
    return Captured(
        asked=asked,
        model=line.model,
        engine=line.engine,
        output_reported=generated is not None,
        predicted_tokens=line.predicted_tokens,
        cached_tokens=line.cached_tokens,
        ttft_s=None if line.first_token_s is None else line.first_token_s - line.asked_s,
        duration_s=line.duration_s - line.asked_s,
        queue_s=line.queue_s or 0.0,
    )


def _with_outputs(found: list[Captured]) -> list[Captured]:
    paces = [pace for one in found if (pace := one.s_per_generated_token)]
    pace_s = statistics.median(paces) if paces else Timing().decode_s
    return [one if one.output_reported else _guessed(one, pace_s) for one in found]


def _guessed(one: Captured, pace_s: float) -> Captured:
    generating_s = one.duration_s - (one.ttft_s or 0.0)
    tokens = max(1, min(OUTPUT_GUESS_MAX, 1 + round(generating_s / pace_s)))
    return msgspec.structs.replace(one, asked=msgspec.structs.replace(one.asked, output_tokens=tokens))
