"""Prompts that any worker of this machine has read: tokens and block hashes of their texts.

A record has the text, its cuts, ids and block hashes. It is found by digests of the text's beginning, as keys
only: the text is compared before anything is reused, and the record's scope, which has the tokenizer and all
that hashes cover besides tokens. So a worker reuses what it would have reused of its own prompts. Templates
and messages do not count: the text is rendered before.

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
from kvatlas.router.prompts.prompt_cache import CHUNK_BYTES, text_keys
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_records import SharedRecords

DELAY_S = 0.1
# Reading so little again costs about as much as finding it.
CHARS_MIN: Final = 4096
# Finding a longer text would hold the event loop for more than 5 ms.
CHARS_MAX: Final = 1 << 21
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


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Record)


class SharedPrompts:
    """Finds and writes prompts in one worker."""

    def __init__(self, records: SharedRecords, stats: PromptStats) -> None:
        self._records = records
        self._stats = stats
        self._waiting: dict[int, tuple[bytes, Conversation]] = {}

    def find(self, scope: bytes, text: str, begin: int, extras: PromptExtras) -> tuple[Turn, CutText] | None:
        """A prompt that may begin as this text does, further than its first ``begin`` characters, which are
        known; None if nothing is known, or too little is new."""
        new = len(text) - begin
        if new < CHARS_MIN or new * _PART < len(text) or len(text) > CHARS_MAX:
            return None
        keys = _full_chunks(scope, text)
        for number in range(len(keys) - 1, begin // CHUNK_BYTES - 1, -1):
            record = self._records.find(keys[number])
            found = None if record is None else _prompt_of(record, scope, extras)
            if found is not None:
                self._stats.shared_hits += 1
                return found
        self._stats.shared_misses += 1
        return None

    def offer(self, scope: bytes, one: Conversation) -> None:
        """Write this prompt soon, unless most of it is there."""
        cut, tokens = one.cut, len(one.turn.ids)
        missing = tokens - one.turn.shared_tokens
        if missing < _TOKENS_MIN or missing * _PART < tokens:
            return
        # A text of one piece has nothing that another one could reuse.
        if cut is None or len(cut.starts) == 1:
            return
        if not CHARS_MIN <= cut.begin + len(cut.text) <= CHARS_MAX:
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(DELAY_S, self.write)
        if len(self._waiting) < _WAITING_MAX:
            self._waiting[id(one)] = scope, one

    def write(self) -> None:
        """Write the prompts that wait."""
        waiting, self._waiting = self._waiting, {}
        for scope, one in waiting.values():
            cut, turn = one.whole_cut(), one.turn
            if cut is None:
                continue
            keys = _full_chunks(scope, cut.text)
            # Of the beginnings some at the end, where next turns go on, and ever fewer before.
            last = len(keys)
            spread = [keys[last - (1 << bit)] for bit in range(last.bit_length())]
            if self._records.put(spread, _record_of(scope, turn, cut)) and turn.chains:
                turn.shared_tokens = len(turn.ids)


def _full_chunks(scope: bytes, text: str) -> list[int]:
    """Keys of the text's beginnings, without that of the last part: a next turn has another one there."""
    return text_keys(scope, text)[:-1]


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
    return Turn(ids, extras, (), chains, len(ids) if chains else 0), cut
