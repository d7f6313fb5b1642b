"""Cache of conversations, found by their beginning, so that of a next turn only the new part is computed.

A conversation is indexed under a chain of keys, one per prefix of its newest turn: per message of a chat,
else per chunk of the text or ids. A key points to the conversation with that prefix that was used last. Keys
only propose: the content is compared before anything is reused. A turn that goes on behind the last one, or
replaces a short end of it, extends the conversation in place; any other is the first turn of a conversation
of its own, which takes its beginning over. One that is part of another is dropped.

Invariants: the estimated size of all conversations is at most ``bytes_max``, and of one at most a quarter of
it (larger ones are not cached); every index key points to a live one. Event-loop thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import Final

import msgspec

from kvatlas.publisher.block_hash import PromptExtras
from kvatlas.router.prompts.conversation import Conversation, Turn
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.prefix_keys import token_keys
from kvatlas.router.prompts.request import SHARE, NotLocalError, extras_bytes
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_prompts import SharedPrompts

_TOKEN_BYTES: Final = 8
"""An id has 4; a block of 16 tokens has a hash of 32 bytes, 8 of it again, its row in the index (4), and the
spare capacity of growing arrays."""
_CONVERSATION_BYTES: Final = 1000
_KEY_BYTES: Final = 100
_LITTLE: Final = 8
"""A part of the tokens is little below one in this many: tokenizing it again costs less than the memory of a
whole prompt."""


_raw_of: Final = attrgetter("raw")


class Earlier(msgspec.Struct, frozen=True, gc=False):
    """A conversation that shares its first keys, ``shared`` in number, with a prompt; ``over``: its turn when
    it was found."""

    one: Conversation
    over: Turn
    shared: int


class PrefixCache:
    """All conversations, least recently used first. A prefix is indexed by the most recently used one that
    has it, which is evicted last: so it is found as long as any of them has it. ``shared``: prompts of all
    workers."""

    def __init__(self, stats: PromptStats, bytes_max: int, shared: SharedPrompts | None = None) -> None:
        self.shared = shared
        self._stats = stats
        self._bytes_max = bytes_max
        self._kept: OrderedDict[int, Conversation] = OrderedDict()
        self._index: dict[int, Conversation] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, scope: bytes, keys: list[int], raws: list[msgspec.Raw] | None = None) -> Earlier | None:
        """The conversation of this scope with the longest indexed prefix. ``raws``: messages with which it
        must begin, as far as ``keys`` say so."""
        index, stats = self._index, self._stats
        for length in range(len(keys), 0, -1):
            found = index.get(keys[length - 1])
            if found is not None:
                break
        else:
            stats.prefix_misses += 1
            return None
        if found.scope != scope or (
            raws is not None and list(map(_raw_of, found.messages[:length])) != raws[:length]
        ):
            stats.prefix_misses += 1
            return None
        self._use(found)
        stats.prefix_hits += 1
        return Earlier(found, found.turn, length)

    def _use(self, one: Conversation) -> None:
        self._kept.move_to_end(id(one))
        # If its first key points to it, it was used last of all that begin like it.
        if self._index.get(one.keys[0]) is not one:
            self._index.update(dict.fromkeys(one.keys, one))

    def put(self, one: Conversation, over: Turn | None = None) -> None:
        """Add a conversation of one turn, which begins as ``over`` does; makes room by dropping what it
        contains, then the least recently used ones."""
        turn = one.turn
        if over is not None:
            common = over.common(turn)
            self._stats.tokens_reused += common
            turn.inherit(over, common, last=False)
        one.messages_bytes = sum([each.weight_bytes for each in one.messages])
        one.fixed_bytes = _CONVERSATION_BYTES + len(one.scope) + extras_bytes(turn.extras)
        one.size_bytes = _size(one)
        if one.size_bytes > self._bytes_max // SHARE:
            self._stats.oversized += 1
        elif one.keys:
            self._kept[id(one)] = one
            self._enter(one, 0, one.size_bytes)

    def put_next(self, one: Conversation, found: Earlier) -> None:
        """Add a turn that begins as what was found, as its next one or as a conversation of its own."""
        before, shared, over, turn = found.one, found.shared, found.over, one.turn
        common = over.common(turn)
        # Another turn may have come while this one was tokenized, or room was needed.
        alone = before.turn is over and id(before) in self._kept
        last, length = len(before.keys) - 1, over.at + len(over.tail)
        if not (
            alone
            and (
                shared > last
                # A question that replaces another one after the same messages would keep the whole prompt a
                # second time. Only the last message, or chunk, may differ: of conversations that share a long
                # system prompt each is kept from its second turn on, and pays twice for its first question.
                or (1 <= last == shared < len(one.keys) and _LITTLE * (length - common) <= length)
            )
        ):
            self.put(one, over)
            return
        one.messages_bytes = (
            before.messages_bytes
            - sum([each.weight_bytes for each in before.messages[shared:]])
            + sum([each.weight_bytes for each in one.messages[shared:]])
        )
        one.fixed_bytes = before.fixed_bytes
        one.size_bytes = _size(one)
        if one.size_bytes > self._bytes_max // SHARE:
            # The turn before stays: dropped, it would take the index keys of other conversations with it.
            self.put(one, over)
            return
        self._stats.tokens_reused += common
        turn.inherit(over, common, last=True)
        more_bytes, index = one.size_bytes - before.size_bytes, self._index
        for key in before.keys[shared:]:
            if index.get(key) is before:
                del index[key]
        before.keys, before.turn, before.messages, before.cut = one.keys, turn, one.messages, one.cut
        before.messages_bytes, before.size_bytes = one.messages_bytes, one.size_bytes
        self._enter(before, shared, more_bytes)

    def _enter(self, one: Conversation, first: int, more_bytes: int) -> None:
        """Index a conversation's keys from number ``first`` on."""
        index = self._index
        for key in one.keys[first:]:
            old = index.get(key)
            index[key] = one
            if old is not None and old is not one and old.keys[-1] == key:
                self._drop(old)
        if index[one.keys[0]] is not one:  # it was not used last, since another one came meanwhile
            self._use(one)
        self._stats.prefix_bytes += more_bytes
        while self._stats.prefix_bytes > self._bytes_max:
            self._drop(next(iter(self._kept.values())))
            self._stats.prefix_evictions += 1

    def _drop(self, one: Conversation) -> None:
        if self._kept.pop(id(one), None) is None:
            return
        self._stats.prefix_bytes -= one.size_bytes
        for key in one.keys:
            if self._index.get(key) is one:
                del self._index[key]

    def check_integrity(self) -> None:
        """For tests: check that index and sizes agree with the conversations."""
        live = {id(one) for one in self._kept.values()}
        assert all(id(one) in live for one in self._index.values())  # noqa: S101
        assert all(one.size_bytes == _size(one) for one in self._kept.values())  # noqa: S101
        assert self._stats.prefix_bytes == sum(one.size_bytes for one in self._kept.values())  # noqa: S101


def cached_ids(cache: PrefixCache, stats: PromptStats, ids: Ids, extras: PromptExtras, scope: bytes) -> Turn:
    """The prompt given by its ids, with the hashes of the longest known prefix."""
    if not ids:
        raise NotLocalError("empty")
    keys = token_keys(scope, ids)
    found = cache.find(scope, keys)
    if found is not None and found.over.ids == ids and found.over.extras == extras:
        stats.tokens_reused += len(ids)
        return found.over
    one = Conversation(scope, keys, Turn(ids, extras))
    over = None if found is None else found.over
    if cache.shared is not None:
        over = cache.shared.find_ids(scope, keys, 0 if found is None else found.shared, extras) or over
        cache.shared.offer_ids(scope, one, over)
    if found is not None and over is found.over:
        cache.put_next(one, found)
    else:
        cache.put(one, over)
    return one.turn


def _size(one: Conversation) -> int:
    cut, turn = one.cut, one.turn
    texts, num_keys = one.messages_bytes, len(one.keys)
    if cut is not None:
        texts += cut.text.__sizeof__()
        num_keys += len(cut.starts)
    return one.fixed_bytes + texts + _TOKEN_BYTES * (turn.at + len(turn.tail)) + _KEY_BYTES * num_keys
