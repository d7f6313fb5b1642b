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

from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.requests import (
    TOKENS_MAX,
    Asked,
    Follows,
    WorkloadError,
    count_of,
    ids_of,
    in_order,
    lines_of,
    milliseconds_of,
)

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
