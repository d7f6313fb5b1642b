"""A workload: requests in the order of their arrival, with ids instead of tokens, and without any text.

The formats are read by ``traces``, and drawn by ``workload``. All of them describe a prompt by ids, one
per ``unit_tokens`` tokens, the last one for the rest. Equal ids at the start of two prompts mean equal
tokens.

Generated tokens are the start of what the next turn adds. So the answer of a request takes the ids of the
later prompt that continues it (``continued``); any other answer has its own ids. Invariants: arrivals do not
decrease; two prompts share a block hash exactly if everything up to it is equal.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.events import BlockHash
from kvatlas.router.observe.prefix_ids import START_UNIT_TOKENS, UNIT_TOKENS

REQUESTS_MAX = 2_000_000
LINE_CHARS_MAX = 4 << 20
# Limit of one prompt, and of one answer.
TOKENS_MAX = 16 << 20
# Number of latest prompts with equal whole units among which the previous turn is searched.
TURNS_OPEN_MAX = 64
# Mooncake's timestamps are rounded to this; requests of one tick are spread over it.
TICK_S = 3.0
_MASK = (1 << 64) - 1


class WorkloadError(ValueError):
    """An unusable workload; the message names the place, the value found and the expected one."""


class Follows(msgspec.Struct, frozen=True, kw_only=True):
    """The previous request of the same client, by its position in the workload. Seconds as recorded.

    In closed sessions a request arrives ``think_s`` after the answer to the previous one; if that pause was
    not recorded, ``gap_s`` after the previous arrival, but not before its answer. With ``answered`` False (a
    sub-agent, which starts beside its parent) it arrives ``gap_s`` after the previous arrival, answered or
    not.
    """

    request: int
    gap_s: float
    think_s: float | None = None
    answered: bool = True


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``ids`` cover prompt and answer, ``unit_tokens`` tokens each except for the last."""

    at_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    session: int = 0
    """Equal for requests of one conversation, if the workload names it."""
    tenant: str = ""
    """Tenant, for routers that hold requests and share free capacity by tenant."""
    unit_tokens: int = UNIT_TOKENS
    follows: Follows | None = None
    """The previous turn, as recorded or inferred; None: it starts a session."""

    @property
    def num_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One validated request of a workload. ``session`` if it has one: then only turns of that session
    continue it. ``ids`` cover the prompt, ``unit_tokens`` each except for the last."""

    at_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    session: int | None = None
    unit_tokens: int = UNIT_TOKENS
    follows: Follows | None = None
    """The previous request if the workload names it; otherwise it is inferred from the ids."""
    whole_units: int | None = None
    """Ids that do not change where a longer prompt goes on; None: those of whole units."""

    @property
    def lasting_ids(self) -> tuple[int, ...]:
        """Ids that a prompt that goes on from this one has too."""
        whole = self.input_tokens // self.unit_tokens if self.whole_units is None else self.whole_units
        return self.ids[:whole]


One = TypeVar("One", Asked, Request)


def in_order(found: list[Asked]) -> list[Asked]:
    """Sort by time and shift the first to 0."""
    found = by_time(found)
    return [msgspec.structs.replace(asked, at_s=asked.at_s - found[0].at_s) for asked in found]


def by_time(found: Sequence[One]) -> list[One]:
    """Sort by time; references to previous requests are adjusted."""
    order = sorted(range(len(found)), key=lambda place: found[place].at_s)
    places = {old: new for new, old in enumerate(order)}

    def moved(one: One) -> One:
        if one.follows is None:
            return one
        before = msgspec.structs.replace(one.follows, request=places[one.follows.request])
        return msgspec.structs.replace(one, follows=before)

    return [moved(found[place]) for place in order]


def lines_of(path: Path) -> Generator[tuple[str, dict[str, Any]]]:
    """Yield each line's position and its fields. Raises ``WorkloadError``."""
    opened = gzip.open if path.suffix == ".gz" else open
    count = 0
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_CHARS_MAX + 1), ""), 1):
                if len(line) > LINE_CHARS_MAX:
                    raise WorkloadError(f"{path}:{number}: a line of more than {LINE_CHARS_MAX} characters")
                if count >= REQUESTS_MAX:
                    raise WorkloadError(f"{path}: more than {REQUESTS_MAX} requests; cut it into pieces")
                if line.strip():
                    count += 1
                    yield f"{path}:{number}", _fields(line, f"{path}:{number}")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: the file does not exist") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise WorkloadError(f"{path}: {error}") from None
    if not count:
        raise WorkloadError(f"{path}: no requests in it")


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        found = line.strip()[:60]
        raise WorkloadError(
            f"{where}: not JSON: {error}; found {found!r}, expected one JSON object per request on each line"
        ) from None
    if not isinstance(fields, dict):
        raise WorkloadError(f"{where}: expected a JSON object, got {type(fields).__name__}")
    return fields


def asked_of(fields: dict[str, Any], where: str) -> Asked:
    """Validate one line of a router's own record. Raises ``WorkloadError``, naming ``where`` and the
    field."""
    length = count_of(fields, "input_length", where, least=1)
    ids = ids_of(fields, where)
    wanted = -(-length // UNIT_TOKENS)
    if len(ids) != wanted:
        raise WorkloadError(
            f"{where}: hash_ids: {len(ids)} ids for input_length = {length}; expected one per "
            f"{UNIT_TOKENS} tokens, so {wanted}"
        )
    at_s = milliseconds_of(fields, "timestamp", where)
    output = count_of(fields, "output_length", where, least=0)
    return Asked(at_s=at_s, input_tokens=length, output_tokens=output, ids=tuple(ids))


def with_start(asked: Asked, start: Sequence[int] | None, where: str) -> Asked:
    """The request in units of ``START_UNIT_TOKENS``: with the ids of its start, if known; those of each other
    unit follow from its own. Raises ``WorkloadError``."""
    tokens, parts = asked.input_tokens, UNIT_TOKENS // START_UNIT_TOKENS
    count = -(-tokens // START_UNIT_TOKENS)
    ids = [identifier * parts + part for identifier in asked.ids for part in range(parts)][:count]
    whole = tokens // UNIT_TOKENS * parts
    if start is not None:
        if len(start) != min(count, parts):
            raise WorkloadError(
                f"{where}: start_ids: {len(start)} ids for {tokens} tokens; expected {min(count, parts)}"
            )
        ids[: len(start)] = start
        whole = max(whole, min(tokens, UNIT_TOKENS) // START_UNIT_TOKENS)
    return msgspec.structs.replace(asked, ids=tuple(ids), unit_tokens=START_UNIT_TOKENS, whole_units=whole)


def ids_of(fields: dict[str, Any], where: str) -> list[int]:
    """Validate the field ``hash_ids``. Raises ``WorkloadError``."""
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise WorkloadError(f"{where}: hash_ids: expected a list of whole numbers")
    return ids


def milliseconds_of(fields: dict[str, Any], key: str, where: str) -> float:
    """Convert a field in milliseconds to seconds. Raises ``WorkloadError``."""
    return _number(fields, key, where, "milliseconds from the start" if key == "timestamp" else "ms") / 1000


def seconds_of(fields: dict[str, Any], key: str, where: str) -> float:
    """Validate a field in seconds. Raises ``WorkloadError``."""
    return _number(fields, key, where, "seconds")


def _number(fields: dict[str, Any], key: str, where: str, expected: str) -> float:
    value = fields.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise WorkloadError(f"{where}: {key} = {value!r}: expected {expected}")
    return value


def count_of(fields: dict[str, Any], key: str, where: str, *, least: int) -> int:
    """Validate a field that is a whole number of tokens. Raises ``WorkloadError``."""
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= TOKENS_MAX:
        raise WorkloadError(
            f"{where}: {key} = {value!r}: expected a whole number from {least} to {TOKENS_MAX}"
        )
    return value


def spread(asked: Sequence[Asked], *, seed: int = 0) -> list[Asked]:
    """Spread arrivals of one tick evenly at random over it, in their order; finer times are unchanged, as are
    those of sessions with known previous turns."""
    times = sorted({a.at_s for a in asked})
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if not gaps or min(gaps) < 0.9 * TICK_S or any(one.follows for one in asked):
        return list(asked)
    draws = np.random.default_rng(seed).uniform(0, TICK_S, len(asked))
    spread_out: list[Asked] = []
    start = 0
    while start < len(asked):
        end = start
        while end < len(asked) and asked[end].at_s == asked[start].at_s:
            end += 1
        for one, offset in zip(asked[start:end], np.sort(draws[start:end]).tolist(), strict=True):
            spread_out.append(msgspec.structs.replace(one, at_s=one.at_s + offset))
        start = end
    return spread_out


def continued(asked: Sequence[Asked]) -> list[Request]:
    """Return prompts with answers: those of the next turn if there is one, else new ids."""
    # A prompt continues an earlier one if it starts with all its whole units and is at least as long as that
    # prompt with its answer. Of several, the longest and then the latest counts; a prompt is continued once.
    waiting: dict[int, deque[int]] = {}
    following: dict[int, int] = {}
    before: dict[int, Follows] = {}
    sessions: list[int] = []
    chains = [_chain(a.lasting_ids) for a in asked]
    for index, one in enumerate(asked):
        session = index if one.session is None else one.session
        for depth in range(len(chains[index]), 0, -1):
            earlier = waiting.get(chains[index][depth - 1])
            turn = None if earlier is None else _goes_on_from(one, earlier, asked)
            if earlier is not None and turn is not None:
                earlier.remove(turn)
                following[turn] = index
                before[index] = Follows(request=turn, gap_s=one.at_s - asked[turn].at_s)
                session = sessions[turn]
                break
        sessions.append(session)
        if chains[index]:
            waiting.setdefault(chains[index][-1], deque(maxlen=TURNS_OPEN_MAX)).append(index)
    own = max((i for a in asked for i in a.ids), default=0) + 1
    made: list[Request] = []
    for index, one in enumerate(asked):
        units = -(-(one.input_tokens + one.output_tokens) // one.unit_tokens)
        next_turn = following.get(index)
        if next_turn is not None:
            ids = asked[next_turn].ids[:units]
        else:
            ids = one.ids + tuple(range(own, own + units - len(one.ids)))
            own += units - len(one.ids)
        made.append(
            Request(
                at_s=one.at_s,
                input_tokens=one.input_tokens,
                output_tokens=one.output_tokens,
                ids=ids,
                session=sessions[index],
                unit_tokens=one.unit_tokens,
                follows=one.follows or before.get(index),
            )
        )
    return made


def _goes_on_from(one: Asked, earlier: deque[int], asked: Sequence[Asked]) -> int | None:
    """Return the latest of ``earlier`` that can be the turn before ``one``."""
    for index in reversed(earlier):
        before = asked[index]
        if before.session == one.session and before.input_tokens + before.output_tokens <= one.input_tokens:
            return index
    return None


def _chain(ids: Iterable[int]) -> list[int]:
    """Return one number per id that identifies it and all ids before it."""
    state, chain = 0x9E3779B97F4A7C15, []
    for identifier in ids:
        state = _mix(state ^ _mix(identifier & _MASK))
        chain.append(state)
    return chain


def _mix(value: int) -> int:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood, 2014): a bijection without visible structure."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def block_hashes(request: Request, block_tokens: int) -> list[BlockHash]:
    """Return a hash per whole block of prompt and answer that identifies everything up to it.

    ``block_tokens`` must divide the workload's unit or be a multiple of it: ids are no finer. Raises
    ``ValueError``.
    """
    unit = request.unit_tokens
    count = request.num_tokens // block_tokens
    if not count:
        return []
    chain = np.array(_chain(request.ids), dtype=np.uint64)
    if block_tokens % unit == 0:
        step = block_tokens // unit
        ends: list[BlockHash] = chain[step - 1 :: step][:count].tolist()
        return ends
    if unit % block_tokens:
        raise ValueError(f"blocks of {block_tokens} tokens do not fit into units of {unit}")
    parts = np.arange(unit // block_tokens, dtype=np.uint64)
    hashes: list[BlockHash] = (
        _mixed(chain[:, None] + parts[None, :] * np.uint64(0xD1342543DE82EF95)).ravel()[:count].tolist()
    )
    return hashes


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
