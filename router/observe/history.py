"""Counts of the last minutes per interval, in a ring of fixed size.

Counters elsewhere only grow. ``HistoryLog`` receives them every ``EVERY_S`` seconds and keeps the
differences, so requests cost nothing extra. Intervals are numbered by the monotonic clock, which all
processes of a machine share: histories of several workers are added up interval by interval. Pure and
bounded.
"""

from __future__ import annotations

import math
import os
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, get_args

import msgspec
import xxhash

from kvatlas.publisher.block_hash import PromptExtras
from kvatlas.publisher.events import BlockHash
from kvatlas.router.openai.request import InboundRequest

EVERY_S = 5.0
# Five minutes.
INTERVALS_MAX = 60


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one engine, or of all. ``requests``: ended requests; ``errors``: those answered with a status
    of 500 or above, or cut by the engine; ``unavailable``: those answered with 503. Engines reported
    ``hit_tokens`` of ``prompt_tokens`` as cached; ``exact`` of ``compared`` predictions were right."""

    requests: int = 0
    errors: int = 0
    unavailable: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    exact: int = 0
    compared: int = 0

    def since(self, before: Counts) -> Counts:
        """The difference; the whole count if a counter fell, because the engine left and came back."""
        was, now = msgspec.structs.asdict(before), msgspec.structs.asdict(self)
        if any(now[name] < was[name] for name in was):
            return self
        return Counts(**{name: now[name] - was[name] for name in was})


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Values at one moment: requests in the proxy, engines, and engines that are up."""

    active: int = 0
    engines: int = 0
    engines_up: int = 0


class HistoryInterval(Counts, frozen=True, kw_only=True):
    """Counts of one interval. ``slot``: its number, which grows by one every ``every_s``; ``seconds``: its
    length, shorter for the current one. ``active``, ``engines`` and ``engines_up`` are values at its end."""

    slot: int
    seconds: float
    active: int
    engines: int
    engines_up: int

    def joined(self, other: Self) -> Self:
        """Merge with another worker's interval: counts are added; gauges that all workers share take the
        maximum."""
        one, two = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        added = {name: one[name] + two[name] for name in (*Counts.__struct_fields__, "active")}
        largest = {name: max(one[name], two[name]) for name in ("seconds", "engines", "engines_up")}
        return msgspec.structs.replace(self, **added, **largest)


class RecentHistory(msgspec.Struct, frozen=True):
    """Intervals of the last five minutes, oldest first; the last one is the current one. ``at_s``: time of
    the data, Unix time."""

    at_s: float
    every_s: float
    intervals: list[HistoryInterval]

    def joined(self, others: Iterable[RecentHistory]) -> RecentHistory:
        """Merge with the histories of sibling workers."""
        by_slot: dict[int, HistoryInterval] = {}
        for history in (self, *others):
            for interval in history.intervals:
                known = by_slot.get(interval.slot)
                by_slot[interval.slot] = interval if known is None else known.joined(interval)
        return RecentHistory(self.at_s, self.every_s, [by_slot[slot] for slot in sorted(by_slot)])


class HistoryLog:
    """History of one process, which started at ``now`` (monotonic seconds) with all counters at zero."""

    def __init__(self, now: float) -> None:
        self._ring: deque[HistoryInterval] = deque(maxlen=INTERVALS_MAX)
        self._before: Mapping[str, Counts] = {}
        self._begun_s = now

    def add(self, now: float, counts: Mapping[str, Counts], gauges: Gauges) -> float:
        """End the current interval if it is over; ``counts`` are by engine. Returns the seconds until the
        next end."""
        if int(now // EVERY_S) != int(self._begun_s // EVERY_S):
            self._ring.append(self._present(now, counts, gauges))
            self._before, self._begun_s = counts, now
        return EVERY_S - now % EVERY_S

    def recent_history(
        self, now: float, counts: Mapping[str, Counts], gauges: Gauges, *, unix_s: float
    ) -> RecentHistory:
        """Return the history at ``now``, which is ``unix_s`` in Unix time."""
        oldest = int(now // EVERY_S) - INTERVALS_MAX
        kept = [interval for interval in self._ring if interval.slot >= oldest]
        return RecentHistory(unix_s, EVERY_S, [*kept, self._present(now, counts, gauges)])

    def _present(self, now: float, counts: Mapping[str, Counts], gauges: Gauges) -> HistoryInterval:
        nothing, sums = Counts(), dict.fromkeys(Counts.__struct_fields__, 0)
        for engine, one in counts.items():
            for name, count in msgspec.structs.asdict(one.since(self._before.get(engine, nothing))).items():
                sums[name] += count
        return HistoryInterval(
            **sums,
            **msgspec.structs.asdict(gauges),
            slot=int(self._begun_s // EVERY_S),
            seconds=now - self._begun_s,
        )


# Most frequent prompt prefixes: a bounded tree of block hashes with decaying counts.
#
# Of one prompt in ``EVERY``, the hashes at ``FIRST_TOKENS`` tokens, twice that, four times, ... enter the
# tree, each below the previous one. Hashes reveal no text. Invariants: at most ``NODES_MAX`` nodes, the least
# recently used one is evicted first; a count halves every ``HALF_LIFE_S``.


EVERY = 4
FIRST_TOKENS = 256
NODES_MAX = 4096
HALF_LIFE_S = 600.0


def decayed(rate: float, seen_s: float, now: float) -> float:
    """Return a count of ``seen_s`` as it is now: it halves every ``HALF_LIFE_S``."""
    return rate * math.exp2((seen_s - now) / HALF_LIFE_S)


class HotPrefix(msgspec.Struct, gc=False):
    """One prefix. ``parent``: hash of the next shorter one; ``rate`` decays."""

    tokens: int
    parent: BlockHash | None
    model: str
    rate: float
    seen_s: float

    def current_rate(self, now: float) -> float:
        """Return the current rate, in prompts of the last minutes."""
        return decayed(self.rate, self.seen_s, now)


class HotPrefixes:
    """The tree of one router; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[BlockHash, HotPrefix] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, model: str, hashes: Sequence[BlockHash], block_tokens: int, now: float) -> None:
        """Count a placed prompt with these block hashes."""
        self._turn += 1
        if self._turn % EVERY:
            return
        parent: BlockHash | None = None
        blocks = max(1, FIRST_TOKENS // block_tokens)
        while blocks <= len(hashes):
            node_hash = hashes[blocks - 1]
            node = self._nodes.get(node_hash)
            if node is None:
                self._nodes[node_hash] = HotPrefix(blocks * block_tokens, parent, model, EVERY, now)
            else:
                node.rate, node.seen_s = node.current_rate(now) + EVERY, now
                self._nodes.move_to_end(node_hash)
            parent, blocks = node_hash, blocks * 2
        while len(self._nodes) > NODES_MAX:
            self._nodes.popitem(last=False)

    def longest(self, hashes: Sequence[BlockHash], block_tokens: int, above_tokens: int = 0) -> int:
        """Return the tokens of the longest prefix in the tree that a prompt of these block hashes has.

        Returns 0 if it is not longer than ``above_tokens``.
        """
        found, blocks = 0, max(1, FIRST_TOKENS // block_tokens)
        while blocks * block_tokens <= above_tokens:
            blocks *= 2
        while blocks <= len(hashes) and hashes[blocks - 1] in self._nodes:
            found, blocks = blocks * block_tokens, blocks * 2
        return found

    def reuse(self, hashes: Sequence[BlockHash], block_tokens: int, now: float) -> Reuse | None:
        """Predict the next prompt with the longest prefix of these block hashes that is counted often.

        Returns None without one that ``_REPEATS_MIN`` counted prompts had.
        """
        found: Reuse | None = None
        blocks = max(1, FIRST_TOKENS // block_tokens)
        while blocks <= len(hashes) and (node := self._nodes.get(hashes[blocks - 1])) is not None:
            rate = node.current_rate(now)
            if rate < _REPEATS_MIN * EVERY:
                break
            # A steady stream of r prompts per second has a decaying count of r * HALF_LIFE_S / ln 2. Of its
            # gaps, exp(-3) = 5 % are longer than three mean ones.
            ttl_s = 3 * HALF_LIFE_S / math.log(2) / rate
            found = Reuse(min(ttl_s, GAP_S_MAX), 0.95, node.tokens)
            blocks *= 2
        return found

    def hottest(self, count: int, now: float) -> list[tuple[BlockHash, HotPrefix]]:
        """Return the ``count`` prefixes with the highest rates and their ancestors; parents first."""
        ranked = sorted(self._nodes, key=lambda key: -self._nodes[key].current_rate(now))[:count]
        wanted: dict[BlockHash, HotPrefix] = {}
        for key in ranked:
            at: BlockHash | None = key
            while at is not None and at not in wanted and (node := self._nodes.get(at)) is not None:
                wanted[at] = node
                at = node.parent
        return sorted(wanted.items(), key=lambda pair: pair[1].tokens)


# When, and how likely, a prompt's blocks are used again: the statistics behind retention hints.
#
# A session of ``n`` turns goes on with the share of all sessions with ``n`` turns that went on within
# ``GAP_S_MAX``; its next turn is expected within twice its own longest recent gap, and not before nine of ten
# turns of all sessions would have come. Gaps are those between arrivals. Invariants: at most
# ``SESSIONS_MAX`` sessions are known, the least recent one is evicted first; a gap longer than ``GAP_S_MAX``
# ends a session.


SESSIONS_MAX = 8192
GAP_S_MAX = 900.0
TURNS_MAX = 16
"""Later turns are counted as this one."""
# Sub-agents and parallel tool calls share a session's name: requests closer than this are one turn.
_GAP_S_MIN = 0.5
_GAP_BINS = 11
"""Gaps of up to 1, 2, 4, ... 1024 s."""
_GAP_S_UNKNOWN = 128.0
_COUNTED_MAX = 4096.0
_PRIOR = 4.0
"""Weight of all turns in the estimate of one of them, in sessions."""
_REPEATS_MIN = 3


class Reuse(NamedTuple):
    """A prediction: the first ``tokens`` tokens of a prompt (None: all) are used again within ``ttl_s`` with
    the probability ``value``."""

    ttl_s: float
    value: float
    tokens: int | None = None


class _Pace(msgspec.Struct, gc=False):
    turns: int
    seen_s: float
    longest_s: float = 0.0
    """Longest gap; earlier ones count for less."""


class SessionPaces:
    """Turns and gaps of the sessions at one router; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.evicted = 0
        """Sessions that were forgotten because there were too many."""
        self._open: OrderedDict[Hashable, _Pace] = OrderedDict()
        # By number of turns: sessions that went on, and that ended.
        self._went_on = [0.0] * (TURNS_MAX + 1)
        self._ended = [0.0] * (TURNS_MAX + 1)
        self._gaps = [0.0] * _GAP_BINS

    def __len__(self) -> int:
        return len(self._open)

    def turn(self, session: Hashable, now: float) -> Reuse:
        """Count a request of a session; predicts the next one."""
        self._end_silent(now)
        pace = self._open.get(session)
        if pace is None:
            pace = self._open[session] = _Pace(1, now)
            if len(self._open) > SESSIONS_MAX:
                self._open.popitem(last=False)
                self.evicted += 1
        elif now - pace.seen_s >= _GAP_S_MIN:
            gap_s = now - pace.seen_s
            self._went_on[min(pace.turns, TURNS_MAX)] += 1
            self._gaps[min(_GAP_BINS - 1, math.ceil(math.log2(max(1.0, gap_s))))] += 1
            pace.turns, pace.seen_s, pace.longest_s = pace.turns + 1, now, max(gap_s, 0.9 * pace.longest_s)
            self._open.move_to_end(session)
            self._forget_old()
        return Reuse(min(GAP_S_MAX, max(2 * pace.longest_s, self._usual_gap_s())), self._goes_on(pace.turns))

    def _goes_on(self, turns: int) -> float:
        """Probability of another turn after this number of turns."""
        at = min(turns, TURNS_MAX)
        went_on, ended = sum(self._went_on), sum(self._ended)
        prior = (went_on + 1) / (went_on + ended + 2)
        return (self._went_on[at] + _PRIOR * prior) / (self._went_on[at] + self._ended[at] + _PRIOR)

    def _usual_gap_s(self) -> float:
        """Gap that nine of ten turns do not exceed."""
        total, below = sum(self._gaps), 0.0
        for at, number in enumerate(self._gaps):
            below += number
            if below >= 0.9 * total > 0:
                return float(1 << at)
        return _GAP_S_UNKNOWN

    def _end_silent(self, now: float) -> None:
        while self._open:
            pace = next(iter(self._open.values()))
            if now - pace.seen_s <= GAP_S_MAX:
                return
            self._open.popitem(last=False)
            self._ended[min(pace.turns, TURNS_MAX)] += 1

    def _forget_old(self) -> None:
        """Halve counts that have grown, so that they follow the traffic."""
        if sum(self._gaps) > _COUNTED_MAX:
            for counts in (self._went_on, self._ended, self._gaps):
                counts[:] = [number / 2 for number in counts]


HintSource = Literal["session", "prefix", "cache_control"]
VALUE_MIN = 0.25
"""No hint is sent below this. Connectors compare values by quarters, and even the lowest one keeps blocks
longer than none."""
_VALUE_UNKNOWN = 0.5
"""Of a prompt that only its client expects to use again."""


class RetentionStats(msgspec.Struct):
    """Counters for metrics."""

    sent: Annotated[dict[str, int], "kvatlas_retention_hints_total{source}"] = msgspec.field(
        default_factory=lambda: dict.fromkeys(get_args(HintSource), 0)
    )
    """Requests sent to an engine with a retention hint, by what it rests on: the pace of its `session`, a
    `prefix` of many prompts, or `cache_control` alone."""
    sessions_evicted: Annotated[int, "kvatlas_retention_sessions_evicted_total"] = 0
    """Sessions whose pace was forgotten, because more than 8,192 were active within 15 minutes."""


class RetentionHints:
    """Predictions of one router, from the arrivals that it sees."""

    def __init__(self) -> None:
        self.stats = RetentionStats()
        self._paces = SessionPaces()

    def predict(
        self, now: float, *, session: Hashable | None, prefix: Reuse | None = None, cache_s: float = 0.0
    ) -> tuple[HintSource, Reuse] | None:
        """Return the expected reuse of a request, and what it rests on; None: none is expected.

        ``session``: counted as one more turn; ``prefix``: the predicted reuse of the prompt's start;
        ``cache_s``: seconds for which its client asks, 0 for none. A client can prolong its hint, but not
        raise its value.
        """
        source: HintSource = "cache_control"
        found = None
        if session is not None:
            source, found = "session", self._paces.turn(session, now)
            self.stats.sessions_evicted = self._paces.evicted
        if prefix is not None and (found is None or found.value < _VALUE_UNKNOWN):
            source, found = "prefix", prefix
        elif cache_s:
            found = Reuse(cache_s, _VALUE_UNKNOWN) if found is None else found
            found = found._replace(ttl_s=max(cache_s, found.ttl_s))
        return None if found is None or found.value < VALUE_MIN else (source, found)

    def expect(self, request: InboundRequest, now: float, *, prefix: Reuse | None, cache_s: float) -> None:
        """Set a request's hint from its predicted reuse, and count it as a turn of its session.

        ``prefix`` and ``cache_s``: as for ``predict``.
        """
        session = None if request.session is None else (request.tenant, request.model, request.session)
        found = self.predict(now, session=session, prefix=prefix, cache_s=cache_s)
        if found is not None:
            request.retention = found[0], hint_json(found[1], request.tenant)


def hint_json(reuse: Reuse, tenant: str) -> bytes:
    """Return the hint as engines get it. Connectors compare owners only, so a digest stands for the name."""
    fields: dict[str, float | str] = {"ttl_s": round(reuse.ttl_s, 3), "value": round(reuse.value, 3)}
    if tenant:
        fields["owner"] = blake2b(tenant.encode(), digest_size=8).hexdigest()
    if reuse.tokens is not None:
        fields["tokens"] = reuse.tokens
    return msgspec.json.encode(fields)


# Prompt prefixes by the isolation groups that sent them: the price of cache isolation.
#
# A prefix is a keyless hash of model, adapter and tokens, without the salt, at every ``STEP_TOKENS`` tokens
# up to ``STEPS_MAX`` of them, then at each doubling. Only operators see counts made of it. Each prompt takes
# the same steps, known or not, so its time reveals nothing. Invariants: at most ``PREFIXES_MAX``
# prefixes, the least recently sent one is dropped first, with ``GROUPS_MAX`` groups each.


STEP_TOKENS = 256
STEPS_MAX = 16
PREFIXES_MAX = 1 << 16
GROUPS_MAX = 8


class GroupPrefixStats(msgspec.Struct):
    """Counters for metrics."""

    dropped: Annotated[int, "kvatlas_isolation_prefixes_dropped_total"] = 0
    """Prefixes no longer compared between isolation groups, since the router keeps a bounded number."""


class GroupPrefixes:
    """Prefixes of the prompts that one router placed while caches are isolated."""

    def __init__(self) -> None:
        self.stats = GroupPrefixStats()
        self._groups: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def add(self, group: str, model: str, adapter: str, tokens: array[int]) -> tuple[int, int]:
        """Add a prompt. Returns the tokens of its longest prefix that this group sent before, and of the
        longest that another group sent."""
        own = other = start = 0
        state, view = xxhash.xxh3_64(_encoder.encode([model, adapter])), memoryview(tokens)
        for end in _prefix_ends(len(tokens)):
            state.update(view[start:end])
            start, key = end, state.intdigest()
            groups = self._groups.get(key, ())
            if group in groups:
                own = end
                groups = tuple(one for one in groups if one != group)
            if groups:
                other = end
            self._groups[key] = (*groups[-GROUPS_MAX + 1 :], group)
            self._groups.move_to_end(key)
        while len(self._groups) > PREFIXES_MAX:
            self._groups.popitem(last=False)
            self.stats.dropped += 1
        return own, other


def _prefix_ends(num_tokens: int) -> Iterator[int]:
    end = STEP_TOKENS
    while end <= num_tokens:
        yield end
        end = end + STEP_TOKENS if end < STEPS_MAX * STEP_TOKENS else 2 * end


# Ids of prompt prefixes that reveal no text, for usage records.
#
# A prompt is cut into units of ``UNIT_TOKENS`` tokens; each gets one id, the last one for the rest. An id is
# a keyed hash (BLAKE2b) of everything up to the end of its unit: tokens, adapter, cache salt, images. The key
# is made once per installation and stays there, so equal prompts have equal ids here and unrelated ids
# elsewhere, and texts cannot be guessed without the key. Two prompts share an id exactly if their prefixes up
# to it are equal, except by chance (ids have 53 bits, which every JSON reader keeps).


UNIT_TOKENS = 512
KEY_BYTES = 32
_ID_BITS = 53
_encoder = msgspec.msgpack.Encoder()


def read_key(path: Path) -> bytes:
    """Read the key of this installation; it is made on first use, readable by its owner only. Raises
    ``OSError``."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _key_of(path)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
    return _key_of(path)


def _key_of(path: Path) -> bytes:
    text = path.read_text(encoding="ascii", errors="replace").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise OSError(
            f"{path}: {KEY_BYTES} bytes in hexadecimal expected; remove the file to have a new key made"
        )
    return key


def prefix_ids(tokens: array[int], model: str, extras: PromptExtras, key: bytes) -> list[int]:
    """Return one id per unit of the prompt."""
    state = blake2b(
        _encoder.encode([model, extras.lora_name, extras.lora_path, extras.cache_salt]),
        key=key,
        digest_size=16,
    ).digest()
    ids = []
    view = memoryview(tokens)
    for start in range(0, len(tokens), UNIT_TOKENS):
        unit = blake2b(state, key=key, digest_size=16)
        unit.update(view[start : start + UNIT_TOKENS])
        for item in extras.multimodal:
            # The prefix before it is the same without it.
            if start <= item.offset < start + UNIT_TOKENS:
                unit.update(_encoder.encode([item.identifier, item.offset]))
        state = unit.digest()
        ids.append(int.from_bytes(state[:8], "big") >> (64 - _ID_BITS))
    return ids
