"""Cache of earlier prompts, found by their beginning, so that only the new part is computed.

An entry is indexed under a chain of keys, one per prefix: per message of a chat, else per chunk of the text
or ids. A key points to the newest prompt with that prefix. Keys only propose: the caller compares the content
before it reuses anything. An entry whose last key is taken over by a longer prompt is dropped at once, since
the longer one contains it; so is a chat that differs from a newer one in a short last message only.

Invariants: the estimated size of all entries is at most ``bytes_max``, and of one at most a quarter of it
(larger ones are not cached); every index key points to a live entry. Event-loop thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import msgspec
import xxhash

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras, num_hash_blocks
from kvatlas.router.prompts.chat.messages import Message
from kvatlas.router.prompts.cuts import CutText, Ids
from kvatlas.router.prompts.request import SHARE, NotLocalError, extras_bytes
from kvatlas.router.prompts.settings import PromptStats

# One earlier prompt: its messages, tokens and hashes, which a next turn extends.


class KnownMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a request and its converted form.

    ``message``: the template's input; ``shape``: its kind (0: not needed); ``num_values``: upper bound of its
    lists and objects; ``images``: digests; ``weight_bytes``: its whole memory.
    """

    raw: msgspec.Raw
    message: Message
    shape: int
    num_values: int
    weight_bytes: int
    images: tuple[bytes, ...] = ()
    plain_role: str = ""
    """Role of a message that a template sees as a role and a non-empty text, and nothing else."""
    plain_text: str = ""
    """That text; empty without such a role."""


_raw_of: Final = attrgetter("raw")


class Entry(msgspec.Struct, eq=False, gc=False):
    """One prompt. Thousands are kept, so it consists of objects that the garbage collector does not track.

    ``scope``: all inputs of text and hashes besides messages, in compact form. ``media``: digests of all
    images, in order; with images, ``ids`` has the template's marks for them and is no prompt.
    """

    keys: tuple[int, ...]
    scope: bytes
    ids: Ids
    extras: PromptExtras
    messages: tuple[KnownMessage, ...] = ()
    media: tuple[bytes, ...] = ()
    cut: CutText | None = None
    """None: the ids are not those of a text alone, or the family makes them."""
    chains: dict[HashScheme, HashChain] = {}
    size_bytes: int = 0
    shared_tokens: int = 0
    """Number of leading tokens that all workers find, with their hashes."""

    def begins_as(self, scope: bytes, raws: list[msgspec.Raw]) -> bool:
        """Whether its first messages are these, byte by byte."""
        known = self.messages if len(raws) == len(self.messages) else self.messages[: len(raws)]
        return self.scope == scope and list(map(_raw_of, known)) == raws

    def inherit(self, other: Entry, num_tokens: int, *, last: bool) -> None:
        """Reuse the hashes of the first ``num_tokens`` tokens, which both prompts share.

        ``last``: the other entry is dropped, so that nothing needs to be copied.
        """
        if other.extras != self.extras:
            return
        for scheme, chain in other.chains.items():
            known, shared = len(chain.hashes), num_hash_blocks(num_tokens, scheme)
            blocks = shared if shared < known else known  # noqa: FURB136  # a call less
            if scheme in self.chains:
                continue
            if last:
                chain.cut(blocks)
            self.chains[scheme] = chain if last else chain.fork(blocks)
        if last:
            other.chains = {}


_CHAIN_BYTES_PER_TOKEN: Final = 4
"""A block of 16 tokens has a hash of 32 bytes, 8 of it again, its row in the index (4), and the spare
capacity of growing arrays."""
_ENTRY_BYTES: Final = 1000
_KEY_BYTES: Final = 100
_LITTLE: Final = 8
"""A part of the tokens is little below one in this many: tokenizing it again costs less than the memory of a
whole prompt."""
_COMPARED: Final = 64
"""Number of ids compared bit by bit."""
_ID_BITS: Final = 32
CHUNK_BYTES: Final = 1024
"""Prompts without messages are indexed by such chunks of their text, or of their ids: 256 of them."""


class PrefixCache:
    """All entries, least recently used first. A prefix is indexed by the most recently used entry that has
    it, which is evicted last: so it is found as long as any entry has it."""

    def __init__(self, stats: PromptStats, bytes_max: int) -> None:
        self._stats = stats
        self._bytes_max = bytes_max
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._index: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: list[int]) -> tuple[Entry, int] | None:
        """The entry proposed for the longest indexed prefix, and how many of ``keys`` it covers."""
        for length in range(len(keys), 0, -1):
            entry = self._index.get(keys[length - 1])
            if entry is not None:
                self._entries.move_to_end(id(entry))
                # If its first key points to it, it was used last of all that begin like it.
                if self._index.get(entry.keys[0]) is not entry:
                    self._index.update(dict.fromkeys(entry.keys, entry))
                return entry, length
        return None

    def find_in(self, scope: bytes, keys: list[int]) -> Entry | None:
        """The entry of this scope proposed for a prompt without messages."""
        found = self.find(keys)
        if found is None or found[0].scope != scope:
            self._stats.prefix_misses += 1
            return None
        self._stats.prefix_hits += 1
        return found[0]

    def put_next(self, entry: Entry, parent: Entry, num_tokens: int) -> None:
        """``put`` for a prompt that shares its first tokens with an entry found here: reuses their hashes,
        and takes the place of an entry that has little else."""
        if _has_little_else(parent, entry, num_tokens):
            self._drop(parent)
        self.put(entry)
        entry.inherit(parent, num_tokens, last=id(parent) not in self._entries)

    def put(self, entry: Entry) -> None:
        """Add a prompt; makes room by dropping prompts that it contains, then the least recently used
        ones."""
        if not entry.keys:
            return
        entry.size_bytes = _size(entry)
        if entry.size_bytes > self._bytes_max // SHARE:
            self._stats.oversized += 1
            return
        for key in entry.keys:
            old = self._index.get(key)
            self._index[key] = entry
            if old is not None and old is not entry and old.keys[-1] == key:
                self._drop(old)
        self._entries[id(entry)] = entry
        self._stats.prefix_bytes += entry.size_bytes
        while self._stats.prefix_bytes > self._bytes_max:
            self._drop(next(iter(self._entries.values())))
            self._stats.prefix_evictions += 1

    def _drop(self, entry: Entry) -> None:
        if self._entries.pop(id(entry), None) is None:
            return
        self._stats.prefix_bytes -= entry.size_bytes
        for key in entry.keys:
            if self._index.get(key) is entry:
                del self._index[key]

    def check_integrity(self) -> None:
        """For tests: check that index and sizes agree with the entries."""
        live = {id(entry) for entry in self._entries.values()}
        assert all(id(entry) in live for entry in self._index.values())  # noqa: S101
        assert self._stats.prefix_bytes == sum(e.size_bytes for e in self._entries.values())  # noqa: S101


def _has_little_else(parent: Entry, entry: Entry, num_tokens: int) -> bool:
    """Whether a chat differs from a newer one in a last message that is quickly tokenized again.

    A question that replaces another one after the same messages would keep the whole prompt a second time.
    Only the last message may differ: of conversations that share a long system prompt each keeps its entry
    from its second turn on, and pays twice for its first question.
    """
    before = len(parent.messages) - 1
    if before < 1 or len(entry.keys) <= before or entry.keys[before - 1] != parent.keys[before - 1]:
        return False
    return _LITTLE * (len(parent.ids) - num_tokens) <= len(parent.ids)


def message_keys(scope: bytes, raws: Sequence[msgspec.Raw]) -> list[int]:
    """One key per message, covering the scope and all messages up to it."""
    key = xxhash.xxh3_64_intdigest(scope)
    keys, digest = [], xxhash.xxh3_64_intdigest
    for raw in raws:
        key = digest(raw, key)
        keys.append(key)
    return keys


def token_keys(scope: bytes, ids: Ids) -> list[int]:
    """One key per full chunk of ids, and one for the rest of a shorter or uneven prompt."""
    return _chunk_keys(xxhash.xxh3_64_intdigest(scope, 1), ids.tobytes())


def text_keys(scope: bytes, text: str) -> list[int]:
    """The same for a prompt's text."""
    return _chunk_keys(xxhash.xxh3_64_intdigest(scope, 2), text.encode(errors="surrogatepass"))


def _chunk_keys(key: int, data: bytes) -> list[int]:
    keys = []
    for start in range(0, len(data), CHUNK_BYTES):
        key = xxhash.xxh3_64_intdigest(data[start : start + CHUNK_BYTES], key)
        keys.append(key)
    return keys


def common_tokens(left: Ids, right: Ids, known: int = 0) -> int:
    """Number of equal leading ids, of which the first ``known`` need no comparison. Usually few are left, so
    this avoids numpy, whose code is no longer in the processor's caches."""
    low, high = known, len(left) if len(left) < len(right) else len(right)  # noqa: FURB136
    while high - low > _COMPARED:  # they are equal up to low, maybe not up to high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    one, two = left[low:high], right[low:high]
    if one == two:
        return high
    differ = int.from_bytes(one, "little") ^ int.from_bytes(two, "little")
    return low + ((differ & -differ).bit_length() - 1) // _ID_BITS  # where the lowest bit is


def cached_ids(cache: PrefixCache, stats: PromptStats, ids: Ids, extras: PromptExtras, scope: bytes) -> Entry:
    """An entry for a prompt given by its ids, with the hashes of the longest known prefix."""
    if not ids:
        raise NotLocalError("empty")
    keys = token_keys(scope, ids)
    parent = cache.find_in(scope, keys)
    entry = Entry(tuple(keys), scope, ids, extras)
    if parent is None:
        cache.put(entry)
        return entry
    shared = common_tokens(parent.ids, ids)
    stats.tokens_reused += shared
    if shared == len(ids) == len(parent.ids) and parent.extras == extras:
        return parent
    cache.put_next(entry, parent, shared)
    return entry


def _size(entry: Entry) -> int:
    texts = 0
    for one in entry.messages:
        texts += one.weight_bytes
    num_keys = len(entry.keys)
    if entry.cut is not None:
        texts += entry.cut.text.__sizeof__()
        num_keys += len(entry.cut.starts)
    per_token = 4 + _CHAIN_BYTES_PER_TOKEN
    fixed = _ENTRY_BYTES + len(entry.scope) + extras_bytes(entry.extras)
    return fixed + texts + per_token * len(entry.ids) + _KEY_BYTES * num_keys
