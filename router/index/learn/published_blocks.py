"""Evidence about an engine's hashes if no event contains a prompt from its first token.

Two proofs remain. An event that names its parent's *whole* hash (engines that publish hashes as bytes)
contains everything its own first hash covers: it proves the algorithm, but not the seed. And a prompt that
the router had to place may contain the tokens of an event: then the prompt up to there is a root span, with
its real extras and the event's hashes.

A pair of event and prompt is only *evidence*, to be tried with real hashes: equal tokens after different
first tokens match nothing. Equal tokens with different extra keys (a salt, an image) or different look-ahead
tokens are not paired, if the event shows these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from publisher.block_hash import HashChain, HashScheme, PromptExtras, extra_keys
from publisher.events import BlockStored, EventDecodeError, to_block_hash
from router.index.learn.root_events import RootEvent, shown

_EVENTS_MAX = 256
# Maximum number of events with the same tokens and different extra keys.
_KEYS_MAX = 8
# Prompts are searched for events up to this length in tokens; every candidate hashes the span from the start.
_SPAN_TOKENS_MAX = 1 << 15

_INT_HASH_BYTES = 8


class PublishedBlocks:
    """The latest stored blocks, by their own tokens."""

    def __init__(self) -> None:
        self._events: dict[tuple[int, tuple[int, ...]], dict[str, BlockStored]] = {}

    def add(self, event: BlockStored) -> None:
        """Remember one stored event that lists hashes."""
        try:
            tokens = event.tokens()
        except EventDecodeError:
            return
        size = event.block_size
        if not event.block_hashes or not size or len(tokens) < size:
            return
        alike = self._events.setdefault((size, tuple(tokens[:size])), {})
        alike[str(event.extra_keys and event.extra_keys[0])] = event
        if len(alike) > _KEYS_MAX:
            del alike[next(iter(alike))]
        if len(self._events) > _EVENTS_MAX:
            del self._events[next(iter(self._events))]

    def evidence(self, prompt: Sequence[int], extras: PromptExtras) -> Iterator[RootEvent]:
        """Yield the spans of this prompt that end with published blocks, the shortest first."""
        limit = min(len(prompt), _SPAN_TOKENS_MAX)
        sizes = {size for size, _ in self._events}
        ends = [(end, size) for size in sizes for end in range(size, limit + 1, size)]
        for end, size in sorted(ends):
            for event in self._events.get((size, tuple(prompt[end - size : end])), {}).values():
                root = _span(event, prompt, end - size, extras)
                if root is not None:
                    yield root


def _span(event: BlockStored, prompt: Sequence[int], start: int, extras: PromptExtras) -> RootEvent | None:
    """Return the prompt up to the end of the event's first block, or of all blocks if some are masked."""
    if (event.parent_block_hash is None) != (start == 0) or event.lora_name != extras.lora_name:
        return None
    size, ahead = event.block_size, event.num_lookahead()
    full = event.num_tokens() == size * len(event.block_hashes)
    end = start + (size if full else event.num_tokens())
    listed = 1 if full else len(event.block_hashes)
    tokens = list(prompt[: end + ahead])
    if len(tokens) < end + ahead or (not full and tokens[start:end] != event.tokens()):
        return None
    if not _alike(event, tokens, range(start, end, size), extras, listed):
        return None
    hashes = [to_block_hash(wire) for wire in event.block_hashes[:listed]]
    return RootEvent(tokens, size, hashes, extras, ahead, full=False, joined=start > 0)


def _alike(
    event: BlockStored, tokens: list[int], starts: Iterable[int], extras: PromptExtras, listed: int
) -> bool:
    """Whether blocks of the prompt at ``starts`` have, in order, the extra keys and the look-ahead of the
    event's first ``listed`` blocks.

    The event does not show which blocks these are.
    """
    size, ahead = event.block_size, event.num_lookahead()
    keys, lookahead = event.extra_keys, event.lookahead_token_ids
    if any(shown and len(shown) < listed for shown in (keys, lookahead)):
        return False
    blocks = iter(starts)
    for number in range(listed):
        for start in blocks:
            end = start + size
            if lookahead and tokens[end : end + ahead] != lookahead[number]:
                continue
            if not keys or _equal(keys[number], extras, start, end + ahead):
                break
        else:
            return False
    return True


def _equal(keys: object, extras: PromptExtras, start: int, end: int) -> bool:
    """Whether a block's extra keys, as listed in an event, equal those of this part of a prompt."""
    told = [] if keys is None else keys
    ours = extra_keys(extras, start, end, tagged=False)
    return told == [list(key) if isinstance(key, tuple) else key for key in ours]


def proven_algorithm(
    event: BlockStored, candidates: Iterable[HashScheme], lora_paths: dict[str, str]
) -> HashScheme | None:
    """Return the first candidate (with any seed) that leads from the event's whole parent hash to its
    first hash.
    """
    parent, first = event.parent_block_hash, next(iter(event.block_hashes), None)
    if not isinstance(parent, bytes) or not isinstance(first, bytes) or len(parent) <= _INT_HASH_BYTES:
        return None
    root = shown(event, lora_paths)
    if root is None or not root.full or root.extras.cache_salt is not None:
        return None
    span = root.tokens[: root.block_size + root.lookahead]
    for scheme in candidates:
        if scheme.lookahead == root.lookahead and root.block_size % scheme.hash_block_size == 0:
            chain = HashChain(scheme, root.first_block.extras, parent=parent)
            chain.extend(span)
            if chain.whole(len(chain.hashes) - 1) == [first]:
                return scheme
    return None
