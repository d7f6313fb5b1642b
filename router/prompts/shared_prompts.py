"""Prompts that any worker of this machine has read: tokens and block hashes of their texts.

A record has the text, its cuts, ids and block hashes. It is found by digests of the text's beginning, as keys
only: the text is compared before anything is reused, and the record's scope, which has the tokenizer and all
that hashes cover besides tokens. So a worker reuses what it would have reused of its own prompts. Templates
and messages do not count: the text is rendered before. Of a prompt that is given as ids, a record has the ids
and their hashes.

A prompt is written ``DELAY_S`` after it was read, with the hashes that were made meanwhile, if the memory
has too little of it. Short ones, and what differs little from a known prompt, cost less to read again.
Event-loop thread only.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Final

import msgspec

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras
from kvatlas.router.prompts.conversation import Conversation, CutText, Turn
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.prefix_keys import CHUNK_BYTES, CHUNK_TOKENS, text_keys
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_records import SharedRecords

DELAY_S = 0.1
# Reading so little again costs about as much as finding it.
CHARS_MIN: Final = 4096
# Finding a longer text would hold the event loop for more than 5 ms.
CHARS_MAX: Final = 1 << 21
_IDS_MIN, _IDS_MAX = CHARS_MIN // 4, CHARS_MAX // 4
# Two pieces between cuts: prompts that differ at their end only are not written again.
_TOKENS_MIN: Final = 512
# A record costs as much as reading this part of its text.
_PART: Final = 16
# Prompts that wait to be written; further ones are read again where they are needed.
_WAITING_MAX: Final = 256


class _Record(msgspec.Struct, array_like=True):
    """``starts``, ``counts`` and ``ids`` are words of 32 bits; ``chains``: ``HashChain.packed``."""

    scope: bytes
    text: memoryview
    starts: memoryview
    counts: memoryview
    ids: memoryview
    chains: list[tuple[HashScheme, int, memoryview]]


_NO_TEXT: Final = CutText("", (), ())
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Record)


class SharedPrompts:
    """Finds and writes prompts in one worker."""

    def __init__(self, records: SharedRecords, stats: PromptStats) -> None:
        self._records = records
        self._stats = stats
        self._waiting: dict[int, tuple[bytes, Conversation, bool]] = {}

    def find(self, scope: bytes, text: str, begin: int, extras: PromptExtras) -> tuple[Turn, CutText] | None:
        """A prompt that may begin as this text does, further than its first ``begin`` characters, which are
        known; None if nothing is known, or too little is new."""
        new = len(text) - begin
        if new < CHARS_MIN or new * _PART < len(text) or len(text) > CHARS_MAX:
            return None
        return self._look_up(scope, text_keys(scope, text), begin // CHUNK_BYTES, extras)

    def find_ids(self, scope: bytes, keys: list[int], first: int, extras: PromptExtras) -> Turn | None:
        """The same for a prompt of ids with these keys, of which the ``first`` are known."""
        new = (len(keys) - first) * CHUNK_TOKENS
        if new < _IDS_MIN or (len(keys) - first) * _PART < len(keys) or len(keys) > _IDS_MAX // CHUNK_TOKENS:
            return None
        found = self._look_up(scope, keys, first, extras)
        return None if found is None else found[0]

    def _look_up(
        self, scope: bytes, keys: list[int], first: int, extras: PromptExtras
    ) -> tuple[Turn, CutText] | None:
        """The prompt with the longest beginning. Not by the last key: its chunk is usually not full."""
        for number in range(len(keys) - 2, first - 1, -1):
            record = self._records.find(keys[number])
            found = None if record is None else _prompt_of(record, scope, extras)
            if found is not None:
                self._stats.shared_hits += 1
                return found
        self._stats.shared_misses += 1
        return None

    def offer(self, scope: bytes, one: Conversation) -> None:
        """Write this prompt soon, unless most of it is there."""
        cut = one.cut
        # A text of one piece has nothing that another one could reuse.
        if cut is not None and len(cut.starts) > 1 and CHARS_MIN <= cut.begin + len(cut.text) <= CHARS_MAX:
            self._offer(scope, one, is_text=True)

    def offer_ids(self, scope: bytes, one: Conversation) -> None:
        """The same for a prompt of ids."""
        if _IDS_MIN <= one.turn.num_tokens <= _IDS_MAX:
            self._offer(scope, one, is_text=False)

    def _offer(self, scope: bytes, one: Conversation, *, is_text: bool) -> None:
        tokens = one.turn.num_tokens
        missing = tokens - one.turn.shared_tokens
        if missing < _TOKENS_MIN or missing * _PART < tokens:
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(DELAY_S, self.write)
        if len(self._waiting) < _WAITING_MAX:
            self._waiting[id(one)] = scope, one, is_text

    def write(self) -> None:
        """Write the prompts that wait."""
        waiting, self._waiting = self._waiting, {}
        for scope, one, is_text in waiting.values():
            cut, turn = one.whole_cut(), one.turn
            if is_text is (cut is None):  # its next turn, which came meanwhile, is of another kind
                continue
            keys = one.keys if cut is None else text_keys(scope, cut.text)
            # Of the beginnings some at the end, where next turns go on, and ever fewer before.
            last = len(keys) - 1
            spread = [keys[last - (1 << bit)] for bit in range(last.bit_length())]
            if self._records.put(spread, _record_of(scope, turn, cut or _NO_TEXT)) and turn.chains:
                turn.shared_tokens = turn.num_tokens


def _record_of(scope: bytes, turn: Turn, cut: CutText) -> bytes:
    return _ENCODER.encode(
        _Record(
            scope,
            memoryview(cut.text.encode(errors="surrogatepass")),
            memoryview(array("I", cut.starts)).cast("B"),
            memoryview(array("I", cut.counts)).cast("B"),
            memoryview(turn.ids).cast("B"),
            [chain.packed() for chain in turn.chains.values() if chain.hashes],
        )
    )


def _prompt_of(encoded: memoryview, scope: bytes, extras: PromptExtras) -> tuple[Turn, CutText] | None:
    """The prompt of a record, if it has this scope."""
    record = _DECODER.decode(encoded)
    if record.scope != scope:
        return None
    text = str(record.text, errors="surrogatepass")
    cut = CutText(text, tuple(record.starts.cast("I")), tuple(record.counts.cast("I")))
    ids: Ids = array("I")
    ids.frombytes(record.ids)
    chains = {chain[0]: HashChain.unpacked(*chain, extras) for chain in record.chains}
    return Turn(ids, extras, chains=chains, shared_tokens=len(ids) if chains else 0), cut
