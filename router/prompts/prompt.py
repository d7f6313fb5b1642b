"""Placement keys of a request: the tokens and block hashes of its prompt, or keys of its text.

It shares its hash chains with the prompt cache, so that a next turn hashes only its new blocks.

If the tokens cannot be known, the text is laid out canonically (role and content of each message, in order)
and cut into chunks of fixed size; each chunk's key hashes everything up to its end. Two requests share their
first n keys exactly when they share the first n chunks.

Invariants of text keys: at least one, at most ``KEYS_MAX``; the same request gives the same keys in every
process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal

import msgspec
import xxhash

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras, num_hash_blocks
from kvatlas.publisher.events import BlockHash
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.prompts.conversation import Turn
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.request import (
    NO_REST,
    ChatBody,
    CompletionBody,
    Rest,
    decode_message,
    decode_prompt,
)
from kvatlas.router.prompts.settings import PromptStats


class Prompt(msgspec.Struct, eq=False, gc=False):
    """Token ids of a request's (first) prompt, in the order in which the engine computes them.

    ``source``: computed here, or by a render server or an engine; ``by`` describes the tokenizer.
    ``rest``: further prompts of the request, which are not in ``token_ids``. ``skips_cache``: the engine does
    not read its prefix cache for this request (it asks for prompt log-probabilities), so its hit is 0.
    """

    _turn: Turn
    _stats: PromptStats
    source: Literal["local", "renderer", "engine"]
    by: str = ""
    rest: Rest = NO_REST
    """Its tokens, and their longest prompt."""
    skips_cache: bool = False
    answer_tokens_max: int = 0
    """Limit that the request sets to its answer; 0: none."""
    answer_tokens_min: int = 1
    """Shortest answer that the request takes."""
    num_answers: int = 1
    """Number of answers (``n``). Each is a request of its own in the engine, which reports the cached tokens
    of any one of them; all but the first also hit what the first stores (``ParentRequest``, vLLM 0.32)."""
    frontend: Frontend = "python"
    """The engines' API server that tokenizes the request in this way."""
    variants: dict[Frontend, Prompt] = {}
    """In a fleet with several frontends: this prompt and the others, as far as they are known."""
    num_tokens: int = 0
    """Length of the prompt in tokens, from its turn."""
    num_prompts: int = 1
    """Number of prompts of the request, from ``rest``."""
    _hashes: dict[HashScheme, Sequence[BlockHash]] = {}

    def __post_init__(self) -> None:
        self.num_tokens = self._turn.at + len(self._turn.tail)  # a property is a call
        self.num_prompts = 1 + self.rest.prompts

    def is_surely_shorter(self, tokens: float) -> bool:
        """Whether the prompt and the answer that is asked for are no longer than this."""
        whole = self.num_tokens + self.answer_tokens_max + self.answer_tokens_min
        return whole <= tokens and self.rest is NO_REST and not self.variants

    def behind(self, frontend: Frontend) -> Prompt | None:
        """Return the prompt of engines with this frontend; None: unknown."""
        return self if frontend == self.frontend else self.variants.get(frontend)

    @property
    def token_ids(self) -> Ids:
        """The ids, as an array; must not be changed."""
        return self._turn.ids

    @property
    def extras(self) -> PromptExtras:
        """Adapter, salt and multimodal items: what hashes cover besides tokens."""
        return self._turn.extras

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]:
        """All block hashes under ``scheme``; must not be changed. ``ValueError`` for an unknown algorithm."""
        made = self._hashes.get(scheme)
        if made is not None:
            return made
        turn, stats = self._turn, self._stats
        chain = turn.chains.get(scheme)
        if chain is None:
            chain = turn.chains[scheme] = HashChain(scheme, turn.extras)
        size, hashes = scheme.hash_block_size, chain.hashes
        known = len(hashes)
        if known < (self.num_tokens - scheme.lookahead) // size:
            hashes = chain.extend(turn.end(known * size), known * size)
        stats.blocks_reused += known
        stats.blocks_hashed += len(hashes) - known
        self._hashes[scheme] = hashes  # type: ignore[assignment]  # an array is a sequence in all but its base
        return hashes  # type: ignore[return-value]

    def num_new_blocks(self, scheme: HashScheme) -> int:
        """Number of hashes not computed yet: about 2.5 us each."""
        chain = self._turn.chains.get(scheme)
        return num_hash_blocks(self.num_tokens, scheme) - (len(chain.hashes) if chain else 0)

    def forked_chain(self, scheme: HashScheme) -> HashChain:
        """Copy the hashes so far, to be extended in a worker thread: another prompt may extend this one's
        meanwhile."""
        chain = self._turn.chains.get(scheme)
        return chain.fork(len(chain.hashes)) if chain else HashChain(scheme, self.extras)

    def adopt(self, chain: HashChain) -> None:
        """Replace the hashes by a ``forked_chain`` that was extended."""
        self._stats.blocks_hashed += self.num_new_blocks(chain.scheme)
        self._turn.chains[chain.scheme] = chain


# About 128 tokens: a few blocks, small enough that a short system prompt already counts.
CHUNK_BYTES: Final = 512
# 128 KiB of text; what two longer texts share beyond that does not change their placement.
KEYS_MAX: Final = 256
# Decoding the messages of more would block the event loop for 5 ms and longer.
_PIECES_MAX: Final = 4096
_FIELD_WITHIN_BYTES: Final = 1 << 16

_ANY = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder(order="deterministic")


class TextAffinity(msgspec.Struct, frozen=True):
    """Chained 64-bit keys of text-prefix chunks, and the reason why tokens are not known."""

    keys: tuple[int, ...]
    reason: str
    num_prompts: int = 1
    num_answers: int = 1

    def is_surely_shorter(self, tokens: float) -> bool:
        """Whether the text has certainly no more tokens than this."""
        return tokens == math.inf


def affinity_keys(pieces: Iterable[bytes], scope: bytes) -> tuple[int, ...]:
    """Keys of the concatenated pieces; ``scope`` (model, adapter, salt) separates requests that share no
    cache."""
    keys: list[int] = []
    parent = xxhash.xxh3_64_intdigest(scope)
    rest = b""
    for piece in islice(pieces, _PIECES_MAX):
        view = memoryview(rest + piece if rest else piece)
        whole = len(view) - len(view) % CHUNK_BYTES
        for start in range(0, whole, CHUNK_BYTES):
            parent = xxhash.xxh3_64_intdigest(view[start : start + CHUNK_BYTES], parent)
            keys.append(parent)
            if len(keys) == KEYS_MAX:
                return tuple(keys)
        rest = bytes(view[whole:])
    if rest or not keys:
        keys.append(xxhash.xxh3_64_intdigest(rest, parent ^ 1))
    return tuple(keys)


def chat_pieces(body: ChatBody) -> Iterator[bytes]:
    """Tools, then role and content of each message; lazily, so that a huge chat costs only its beginning.

    Raises ``ApiError`` 400 for a message of a wrong type.
    """
    if bytes(body.tools) != b"null":
        yield _canonical(body.tools)
    for index, raw in enumerate(body.messages):
        message = decode_message(raw, index)
        yield f"\x1e{message.get('role')}\x1f".encode(errors="replace")
        yield from _content(message.get("content"))
        if message.get("tool_calls"):
            yield _ENCODER.encode(message["tool_calls"])


def completion_pieces(body: CompletionBody) -> Iterator[bytes]:
    """The first prompt's text, or its token ids as JSON. Raises ``ApiError`` 400 for a wrong type."""
    prompt = decode_prompt(body.prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    yield prompt.encode() if isinstance(prompt, str) else _ENCODER.encode(prompt)


def raw_piece(body: bytes, field: bytes) -> bytes:
    """The beginning of a body that is too large to be decoded, from ``field`` on if that is near: there,
    bodies of one conversation differ only in the newest messages."""
    start = max(0, body.find(field, 0, _FIELD_WITHIN_BYTES))
    return body[start : start + KEYS_MAX * CHUNK_BYTES]


def _content(content: Any) -> Iterator[bytes]:
    if isinstance(content, str):
        yield content.encode()
        return
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        yield text.encode() if isinstance(text, str) else _ENCODER.encode(part)


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return _ANY.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _canonical(raw: msgspec.Raw) -> bytes:
    value = _decoded(raw)
    return bytes(raw) if value is None else _ENCODER.encode(value)
