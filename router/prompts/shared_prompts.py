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
import math
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
# Shorter prompts are not shared; finding longer ones would hold the event loop for more than 5 ms.
CHARS_MIN: Final = 4096
CHARS_MAX: Final = 1 << 21
_IDS_MIN, _IDS_MAX = CHARS_MIN // 4, CHARS_MAX // 4
# Less new text is not looked up, and a prompt with fewer new tokens not written: reading it again costs less.
# So much is two pieces between cuts, the most that another end of a long message makes new.
NEW_CHARS_MIN: Final = 2048
_NEW_TOKENS_MIN: Final = 512
# A smaller part of a prompt costs less than its record; cuts of a long text are half as far apart.
_PART: Final = 16
# A step of the event loop writes this much, in about 1 ms, or one longer prompt; then others have their turn.
_STEP_TOKENS: Final = 1 << 16
_STEP_S: Final = 0.002
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
        if new < NEW_CHARS_MIN or new * _PART < len(text) or not CHARS_MIN <= len(text) <= CHARS_MAX:
            return None
        return self._look_up(scope, text_keys(scope, text), begin // CHUNK_BYTES, extras)

    def find_ids(self, scope: bytes, keys: list[int], first: int, extras: PromptExtras) -> Turn | None:
        """The same for a prompt of ids with these keys, of which the ``first`` are known."""
        new, tokens = len(keys) - first, len(keys) * CHUNK_TOKENS
        if new < 2 or new * _PART < len(keys) or not _IDS_MIN <= tokens <= _IDS_MAX:
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

    def offer(self, scope: bytes, one: Conversation, over: Turn | None, num_tokens: int) -> None:
        """Write this prompt soon, unless most is there. Its first ``num_tokens`` are those of ``over``."""
        cut = one.cut
        # A text of one piece has nothing that another one could reuse.
        if cut is not None and len(cut.starts) > 1 and CHARS_MIN <= cut.begin + len(cut.text) <= CHARS_MAX:
            self._offer(scope, one, over, num_tokens, is_text=True)

    def offer_ids(self, scope: bytes, one: Conversation, over: Turn | None) -> None:
        """The same for a prompt of ids."""
        if _IDS_MIN <= one.turn.num_tokens <= _IDS_MAX:
            self._offer(scope, one, over, 0 if over is None else over.common(one.turn), is_text=False)

    def _offer(
        self, scope: bytes, one: Conversation, over: Turn | None, num_tokens: int, *, is_text: bool
    ) -> None:
        turn, tokens = one.turn, one.turn.num_tokens
        if over is not None:
            turn.shared_tokens = min(over.shared_tokens, num_tokens)
        new = tokens - turn.shared_tokens
        if new < _NEW_TOKENS_MIN or new * _PART < tokens:
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(DELAY_S, self._write_some)
        if len(self._waiting) < _WAITING_MAX:
            self._waiting[id(one)] = scope, one, is_text

    def _write_some(self) -> None:
        """Write prompts that wait in steps of the event loop."""
        self.write(_STEP_TOKENS)
        if self._waiting:
            asyncio.get_running_loop().call_later(_STEP_S, self._write_some)

    def write(self, tokens_max: float = math.inf) -> None:
        """Write prompts that wait, the last of which reaches this number of tokens together."""
        while self._waiting and tokens_max > 0:
            scope, one, is_text = self._waiting.pop(next(iter(self._waiting)))
            cut, turn = one.whole_cut(), one.turn
            tokens_max -= turn.num_tokens
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
            memoryview(turn.end(0)).cast("B"),
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
