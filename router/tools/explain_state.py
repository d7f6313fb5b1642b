"""Explanation of hits on the engines of a replayed capture, block by block.

The hit is the serving code's own prediction. Two boundaries are then analysed: the first one beyond the hit,
and the end of the full-attention prefix if that is longer. For each the explanation names the spec class, the
missing block, and the block's last journal entry (never stored, masked, evicted, cleared, lost in a restart).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from publisher.block_hash import HashScheme, PromptExtras
from publisher.events import BlockHash, EventDecodeError, Family, SpecClass
from router.config.schema import Config, ModelConfig
from router.index.base import GPU, Plane
from router.index.learn.layout import CacheLayout, make_layout
from router.index.model import HashedPrompt
from router.index.query_plan import ClassHit, EngineHit, EngineQuery, query_hits
from router.openai.body import peek
from router.openai.errors import ApiError
from router.openai.request import CHAT, COMPLETION, PROMPT_APIS, RESPONSES, InboundRequest
from router.prompts.hub import Locator, TokenizerProblem, parse_source
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.prompts.settings import ANY_MODEL, ModelPrompts
from router.tools.replay_player import EventPosition, MaskedSpan, Player
from router.tools.trace_verification import ProbePrompt, TraceProbe

# The blocks that a hit of a given length needs, by spec class: the inverse of ``router/index/hit_rules.py``,
# for one engine and one boundary. Invariant, unless EAGLE windows make the search order matter: a boundary is
# valid for a class if and only if every need of the class is met.


class Need(msgspec.Struct, frozen=True):
    """One needed block of each group of a class.

    Any of the prefixes that end at ``ends`` (tokens) satisfies it; there are several only if a hit may end
    inside a block.
    """

    ends: tuple[int, ...]
    block_size: int

    @property
    def block(self) -> int:
        """Number of the block in its group's block table."""
        return (self.ends[0] - 1) // self.block_size


def needs(layout: CacheLayout, spec_class: SpecClass, boundary: int, num_tokens: int) -> list[Need]:
    """Return what ``spec_class`` must hold for a hit of ``boundary`` tokens, in token order."""
    size, unit = spec_class.block_size, layout.hash_block_size
    eagle = int(spec_class.spec.is_eagle and not layout.lookahead)
    inside = size > layout.alignment
    match spec_class.family:
        case Family.FULL if inside:
            return _full_inside(boundary + eagle * unit, size, unit, (num_tokens - 1) // unit * unit)
        case Family.FULL:
            return _blocks(0, boundary + eagle * size, size)
        case Family.WINDOW:
            end = boundary + eagle * size
            window = spec_class.spec.sliding_window or 0
            count = max(1, -(-(window - 1) // size) + eagle)
            return _blocks(max(0, end - count * size), end, size)
        case Family.CHUNKED:
            chunk = spec_class.spec.attention_chunk_size or size
            return _blocks(boundary // chunk * chunk, boundary, size)
        case _:
            return [Need((boundary,), size)]


def _blocks(start: int, end: int, size: int) -> list[Need]:
    return [Need((block_end,), size) for block_end in range(start + size, end + 1, size)]


def _full_inside(end: int, size: int, unit: int, limit: int) -> list[Need]:
    """Return the whole blocks before ``end``, and the last block's part up to ``end`` or any longer one."""
    whole = end // size * size
    found = _blocks(0, whole, size)
    if end > whole:
        last = max(end, min(whole + size, limit))
        found.append(Need(tuple(range(end, last + 1, unit)), size))
    return found


Why = Literal["never stored", "masked", "evicted", "cleared", "restarted", "beyond the prompt", "not learned"]


class MissingBlock(msgspec.Struct, frozen=True):
    """A block that a longer hit would need.

    ``seq`` and ``event`` (its number in the batch) identify the event that removed or masked it;
    ``stored_seq`` the event that had stored it.
    """

    spec_class: str
    group: int
    block: int
    tokens: tuple[int, int]
    hash: str | None
    why: Why
    seq: int | None = None
    event: int | None = None
    stored_seq: int | None = None
    offloaded: tuple[str, ...] = ()
    """Locations outside the GPU that hold it: medium, and owner if events name one."""


class Boundary(msgspec.Struct, frozen=True):
    """The blocks a hit of ``tokens`` needs and the engine lacks: the first one, and their number."""

    tokens: int
    missing_blocks: int
    first: MissingBlock | None
    by_class: dict[str, int]
    """Missing blocks by spec class, for classes that lack any."""


class EngineExplanation(msgspec.Struct, frozen=True):
    """Explanation for one engine and one prompt, at ``seq``."""

    engine: str
    seq: int | None
    mode: str
    hit_tokens: int
    offloaded_tokens: int
    """The hit including all tokens that would be loaded; ``storage_tokens`` of it come from storage."""
    shared_prefix_tokens: int
    by_class: tuple[ClassHit, ...]
    ended_by: MissingBlock | None
    """None: the hit has its maximal length, or nothing can be predicted."""
    whole_prompt: bool
    """Whether the hit ends only because the last token is always computed."""
    next_boundary: Boundary | None
    shared_prefix_boundary: Boundary | None
    why_unknown: str = ""
    storage_tokens: int = 0
    history: str = ""
    """Part of the engine's history that the capture lacks; empty: complete since the engine's start."""


def explain_engine(
    player: Player, source: str, prompt: HashedPrompt, scheme: HashScheme | None = None
) -> EngineExplanation:
    """Explain one engine. ``scheme`` overrides the detected one."""
    run, hit = player.run_of(source), _hit(player, source, prompt, scheme)
    known = _PromptJournal(player, source, prompt, scheme)
    following = at_shared_prefix = None
    last = 0
    if known.layout is not None and hit.mode != "unknown":
        step, replay = known.layout.alignment, known.layout.replay_tokens
        last = (prompt.num_tokens - 1) // step * step
        last = last if last > replay else 0
        if hit.hit_tokens < last:
            following = known.boundary(max(hit.hit_tokens, replay // step * step) + step)
            if hit.shared_prefix_tokens > following.tokens:
                at_shared_prefix = known.boundary(hit.shared_prefix_tokens)
    blocker = at_shared_prefix or following
    return EngineExplanation(
        engine=source,
        seq=run.last_seq,
        mode=hit.mode,
        hit_tokens=hit.hit_tokens,
        offloaded_tokens=hit.offloaded_tokens,
        shared_prefix_tokens=hit.shared_prefix_tokens,
        by_class=hit.by_class,
        ended_by=blocker.first if blocker is not None else None,
        whole_prompt=hit.mode != "unknown" and hit.hit_tokens >= last,
        next_boundary=following,
        shared_prefix_boundary=at_shared_prefix,
        why_unknown=hit.why_unknown,
        storage_tokens=hit.storage_tokens,
        history=_history(player, source),
    )


def _hit(player: Player, source: str, prompt: HashedPrompt, scheme: HashScheme | None) -> EngineHit:
    """Predict with the serving code; with ``scheme``, use it instead of the detected one."""
    layout = _layout(player, source, scheme)
    if scheme is None or layout is None:
        return player.fleet.predict(prompt, [source], detail=True)[source]
    if layout.missing_facts:
        why = f"configure {', '.join(layout.missing_facts)} for this model"
        return EngineHit("unknown", why_unknown=why)
    slot = player.ledger.slot(source)
    if slot is None:
        return EngineHit("native", alignment=layout.alignment)
    rows = player.ledger.lookup(prompt.hashes(scheme))
    seat = EngineQuery(source, scheme, layout, slot, stores=player.fleet.engine(source).stores)
    return query_hits(rows, prompt.num_tokens, [seat], detail=True)[source]


def _layout(player: Player, source: str, scheme: HashScheme | None) -> CacheLayout | None:
    layout = player.fleet.engine(source).layout
    if layout is None or scheme is None:
        return layout
    return make_layout(
        layout.groups,
        player.fleet.facts,
        scheme.hash_block_size,
        layout.lookahead,
        inside_seen=layout.inside_seen,
    )


def _history(player: Player, source: str) -> str:
    run = player.run_of(source)
    parts = []
    if run.first_seq:
        parts.append(f"the capture begins at seq {run.first_seq}")
    if run.missing_batches:
        parts.append(f"{run.missing_batches} batches are missing in {run.gaps} gaps")
    if run.undecodable or run.rejected_events:
        parts.append(f"{run.undecodable} batches and {run.rejected_events} events could not be decoded")
    return ", ".join(parts)


class _PromptJournal:
    """The journal's entries for the blocks of one prompt on one engine."""

    def __init__(self, player: Player, source: str, prompt: HashedPrompt, scheme: HashScheme | None) -> None:
        self._player = player
        self._source = source
        self._prompt = prompt
        self.layout = _layout(player, source, scheme)
        engine = player.fleet.engine(source)
        used = scheme or engine.scheme
        self._hashes: Sequence[BlockHash] = () if used is None else prompt.hashes(used)
        if scheme is None and engine.learned is not None:
            self._hashes = engine.learned.translate(self._hashes)
        layout = self.layout
        # Single group with EAGLE: the block it drops must itself lie before the prompt's last token.
        eagle = layout is not None and not layout.lookahead and any(c.spec.is_eagle for c in layout.classes)
        if layout is not None and layout.single_group and eagle:
            self._hashes = self._hashes[: (prompt.num_tokens - 1) // layout.hash_block_size]

    def boundary(self, tokens: int) -> Boundary:
        """Return what is missing for a hit of ``tokens``; full attention first, like the engine's search."""
        layout = self.layout
        if layout is None:
            raise AssertionError("called only if the layout is known")
        first: MissingBlock | None = None
        counts: dict[str, int] = {}
        for spec_class in layout.classes:
            for need in needs(layout, spec_class, tokens, self._prompt.num_tokens):
                for group in spec_class.group_idxs:
                    if any(self._copies(end, Plane("GPU", group)) for end in need.ends):
                        continue
                    counts[spec_class.label] = counts.get(spec_class.label, 0) + 1
                    first = first or self._missing(need, spec_class, group)
        return Boundary(tokens, sum(counts.values()), first, counts)

    def _copies(self, end: int, plane: Plane) -> int:
        block = self._hash(end)
        log = None if block is None else self._player.ledger.log(self._source, plane, block)
        return log.copies if log is not None else 0

    def _hash(self, end: int) -> BlockHash | None:
        """Return the hash of the prefix of ``end`` tokens; None beyond the prompt's last full block."""
        number = end // (self.layout.hash_block_size if self.layout is not None else 1) - 1
        return self._hashes[number] if number < len(self._hashes) else None

    def _missing(self, need: Need, spec_class: SpecClass, group: int) -> MissingBlock:
        end = need.ends[0]
        why, at, stored = self._why(end, group)
        block = self._hash(end)
        start = need.block * need.block_size
        return MissingBlock(
            spec_class.label,
            group,
            need.block,
            (start, min(end, start + need.block_size)),
            None if block is None or block < 0 else f"{block:016x}",
            why,
            at.seq if at is not None else None,
            at.event if at is not None else None,
            stored.seq if stored is not None else None,
            self._offloaded(end, group),
        )

    def _offloaded(self, end: int, group: int) -> tuple[str, ...]:
        """Return the locations outside the GPU that hold the block that ends at ``end``."""
        planes = self._player.ledger.seen_planes(self._source)
        held = (p for p in planes if p.group_idx == group and p.medium != GPU and self._copies(end, p))
        return tuple(sorted(plane.medium for plane in held))

    def _why(self, end: int, group: int) -> tuple[Why, EventPosition | None, EventPosition | None]:
        """Return the fate of the block that ends at ``end``: reason, event, and the event that stored it."""
        block = self._hash(end)
        if block is None:
            return "beyond the prompt", None, None
        if block < 0:
            return "not learned", None, None
        log = self._player.ledger.log(self._source, Plane("GPU", group), block)
        if log is not None and log.how:
            return log.how, log.gone, log.stored
        span = self._masking_span(end, group)
        return ("never stored", None, None) if span is None else ("masked", span.at, None)

    def _masking_span(self, end: int, group: int) -> MaskedSpan | None:
        """Return the latest stored event that covered this block of this prompt without listing it."""
        spans = self._player.masked.get((self._source, group), {})
        if not spans or self.layout is None:
            return None
        unit, target = self.layout.hash_block_size, self._hash(end)
        found: list[MaskedSpan] = []
        for start in range(0, end, unit):
            parent = None if start == 0 else self._hash(start)
            for span in spans.get(parent, ()):
                covers = start + span.event.num_tokens() >= end
                if covers and target not in span.listed and self._same_tokens(span, start, end):
                    found.append(span)
        return max(found, key=lambda span: span.at, default=None)

    def _same_tokens(self, span: MaskedSpan, start: int, end: int) -> bool:
        # For redacted captures, decided by the parent alone, or by any listed hash.
        if self._player.run_of(self._source).redacted:
            return start > 0 or any(block in span.listed for block in self._hashes)
        try:
            tokens = span.event.tokens()
        except EventDecodeError:
            return False
        return tokens[: end - start] == list(self._prompt.token_ids[start:end])


# The prompt to explain: token ids as given, or a request read as the router reads it.


BODY_BYTES_MAX = 64 << 20
# Values of ``--api``, and the path of each.
PATHS: Final = {name: path for path, name in PROMPT_APIS.items()}
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class PromptError(Exception):
    """A request that cannot be explained; the message names the file and the reason."""


class _Fields(msgspec.Struct):
    """The fields of a body that determine how it is read."""

    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_salt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_body(path: Path) -> bytes:
    """Read the request's file. Raises ``PromptError``."""
    try:
        with path.open("rb") as file:
            body = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from None
    if len(body) > BODY_BYTES_MAX:
        raise PromptError(f"{path}: over {BODY_BYTES_MAX} bytes")
    return body


def endpoint_of(path: Path, body: bytes, api: str | None) -> str:
    """Return the path of ``api``; without it that of a chat, completion or response, or ``tokens``, by the
    body's fields. Raises ``PromptError``.
    """
    if api is not None:
        return PATHS[api]
    fields = _fields(path, body)
    if fields.token_ids is not msgspec.UNSET:
        return "tokens"
    if fields.messages is not msgspec.UNSET:
        return CHAT
    if fields.prompt is not msgspec.UNSET:
        return COMPLETION
    if fields.input is not msgspec.UNSET:
        return RESPONSES
    raise PromptError(f"{path}: expected messages, prompt, input or token_ids in it")


def router_body(path: Path, body: bytes, api: str | None) -> bytes:
    """Convert the body for a router's explain endpoint: token ids become a completion prompt."""
    if endpoint_of(path, body, api) != "tokens":
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except _BAD_JSON as error:
        raise PromptError(f"{path}: {error}") from None
    fields["prompt"] = fields.pop("token_ids")
    return msgspec.json.encode(fields)


def read_prompt(path: Path, body: bytes, config: Config, api: str | None) -> HashedPrompt:
    """Read the prompt of a request. Raises ``PromptError``, for text also if no tokenizer is configured."""
    endpoint = endpoint_of(path, body, api)
    if endpoint == "tokens":
        return _tokens(path, body)
    plain = _fields(path, body)
    if endpoint == COMPLETION and plain.cache_salt is msgspec.UNSET and not config.models:
        ids = _ids(plain.prompt)
        if ids is not None:
            return _checked(path, ids, PromptExtras())
    return asyncio.run(_read(path, body, endpoint, config))


def _tokens(path: Path, body: bytes) -> HashedPrompt:
    try:
        probe = msgspec.json.decode(body, type=TraceProbe)
    except _BAD_JSON as error:
        raise PromptError(f"{path}: {error}") from None
    return _checked(path, probe.token_ids, probe.extras())


def _checked(path: Path, token_ids: list[int], extras: PromptExtras) -> ProbePrompt:
    if not token_ids:
        raise PromptError(f"{path}: it contains no tokens")
    if min(token_ids) < 0 or max(token_ids) >= 1 << 32:
        raise PromptError(f"{path}: token ids must lie in 0..{(1 << 32) - 1}")
    return ProbePrompt(token_ids, extras)


def _ids(raw: msgspec.Raw | msgspec.UnsetType) -> list[int] | None:
    """Return the prompt if it is one list of token ids."""
    if isinstance(raw, msgspec.UnsetType):
        return None
    try:
        return msgspec.json.decode(raw, type=list[int])
    except _BAD_JSON:
        return None


def _fields(path: Path, body: bytes) -> _Fields:
    try:
        return msgspec.json.decode(body, type=_Fields)
    except _BAD_JSON as error:
        raise PromptError(f"{path}: {error}") from None


async def _located(model: ModelConfig, locator: Locator) -> ModelPrompts:
    """Locate the tokenizer by directory or name: without an engine there is no other source.

    Raises ``TokenizerProblem``.
    """
    source, prompts = parse_source(model.tokenizer), model.prompts()
    if source.kind != "repository":
        return prompts
    found = await locator.locate(source)
    return msgspec.structs.replace(prompts, tokenizer_dir=str(found.folder))


async def _read(path: Path, body: bytes, endpoint: str, config: Config) -> HashedPrompt:
    async def no_engine(
        url: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        raise OSError("no engine available")

    try:
        locator = Locator(config.prompts)
        models = {name: await _located(config.model(name), locator) for name in {*config.models, ANY_MODEL}}
        reader = PromptReader(models, config.prompts, no_engine)
    except ValueError as error:
        raise PromptError(str(error)) from None
    except TokenizerProblem as problem:
        raise PromptError(f"{problem}; {problem.remedy}") from None
    try:
        peeked = peek(body)
        read = await reader.read(InboundRequest("POST", endpoint, b"", [], body, peeked.model, peeked.stream))
    except ApiError as error:
        raise PromptError(f"{path}: {error.message}") from None
    finally:
        reader.close()
    if not isinstance(read, Prompt):
        hint = "; give --tokenizer DIR or ORG/NAME, or token_ids" if read.reason == "no_tokenizer" else ""
        raise PromptError(f"{path}: its tokens cannot be computed here ({read.reason}){hint}")
    return read
