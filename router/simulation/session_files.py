"""Session files: one JSON object per recorded agent session, in the format of kv-cache-tester.

``requests`` have ``t`` (s from the session's start), ``in`` and ``out`` (tokens) and ``hash_ids``, one per
``block_size`` tokens of the prompt, with or without one for the rest. Ids are local to a session. Entries
of ``type`` "subagent" have ``requests`` of their own, whose times count from the session's start, or from
the entry's ``t`` if they begin before it.

Content shared between sessions is recorded only by its length: tool definitions of ``tool_tokens`` count as
equal in all sessions with the same length, and system prompts of ``system_tokens`` after equal tools too.

Sessions start evenly over the duration of the longest one. In closed replay a turn follows the previous one
of its list, after ``think_time`` if recorded, else after the gap less ``api_time``; a sub-agent starts
beside the latest earlier request of its parent.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.router.simulation.requests import (
    Asked,
    Follows,
    WorkloadError,
    count_of,
    ids_of,
    in_order,
    lines_of,
    seconds_of,
)

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
