"""Block hashes as vLLM computes them, without importing vLLM.

Each hash covers a whole prefix up to a hash-block boundary: ``h_i = H((h_{i-1}, tokens_i, extra_i))`` with
``h_{-1} = H(seed)``; ``H`` is SHA-256 (vLLM's default) or XXH3-128, over pickle protocol 5 (default) or over
canonical CBOR.
Facts: vllm/v1/core/kv_cache_utils.py of 0.32 and, for look-ahead, 0.33.

Pickle writes a back reference where the same *object* occurs twice, so equal strings must be distinct
objects exactly where vLLM's are: LoRA name and path, and the identifiers of two multimodal items. The
constant tags ("lora", "mm") are shared objects both in vLLM and here.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import cbor2
import msgspec
import xxhash

from kvatlas.publisher.events import BlockHash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# vLLM's fixed seed since 0.29, used unless PYTHONHASHSEED is set in the engine's environment.
DEFAULT_SEED = "vllm-none-hash"

# Algorithms that a router can reproduce if it knows the seed. The xxhash ones need a PYTHONHASHSEED in the
# engine's environment; without it they are seeded at random. There are two more names: ``SGLANG``, and
# ``learned``: our own chain (xxh3-128 over msgpack), for engines whose hashes cannot be reproduced and are
# looked up by token prefix instead.
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

# SGLang's page hashes: SHA-256 over the digest before and the page's tokens as little-endian 32-bit words.
# Events carry its first eight bytes (``get_hash_str``, srt/mem_cache/utils.py of SGLang 0.5.23). With EAGLE a
# page is of pairs, each token with the one behind it: a look-ahead of one (``RadixKey.is_bigram``).
SGLANG = "sglang"
_U32 = (1 << 32) - 1
_SGLANG_SALT = b"sglang-cache-salt-v1\0"


class HashScheme(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """All inputs of a block hash except the prompt.

    ``hash_block_size`` and ``lookahead`` are in tokens. ``tagged``: extra keys carry their source (vLLM 0.31
    and later); otherwise they are bare values (0.30 and older).
    """

    algo: str = "sha256"
    seed: str = DEFAULT_SEED
    hash_block_size: int = 16
    lookahead: int = 0
    tagged: bool = True


class MultimodalItem(msgspec.Struct, frozen=True):
    """One image, audio or video of a prompt: its content identifier and its token range."""

    identifier: str
    offset: int
    length: int


class PromptExtras(msgspec.Struct, frozen=True):
    """Inputs of a prompt's hashes besides its tokens."""

    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()


NO_EXTRAS = PromptExtras()


def pickled(value: object) -> bytes:
    """Input bytes of the algorithms without a suffix."""
    return pickle.dumps(value, 5)


def canonical_cbor(value: object) -> bytes:
    """Input bytes of the algorithms named ``_cbor``."""
    return cbor2.dumps(value, canonical=True)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class _Format(msgspec.Struct, frozen=True):
    """How an algorithm serializes and hashes.

    A number takes one byte more from each of ``steps`` on, and two more from 65536 on. ``tail`` is the number
    of bytes after the numbers of a tuple that is serialized alone.
    """

    dumps: Callable[[Any], bytes]
    hasher: Callable[[bytes], Any]
    steps: tuple[int, int]
    tail: int = 0


_FORMATS: Final = {
    "sha256": _Format(pickled, hashlib.sha256, (0, 256), 3),
    "sha256_cbor": _Format(canonical_cbor, hashlib.sha256, (24, 256)),
    "xxhash": _Format(pickled, xxhash.xxh3_128, (0, 256), 3),
    "xxhash_cbor": _Format(canonical_cbor, xxhash.xxh3_128, (24, 256)),
    "learned": _Format(msgspec.msgpack.encode, xxhash.xxh3_128, (128, 256)),
}
# From this many new blocks on, they are serialized together (``_plain_hashes``).
_MANY_BLOCKS = 64


def hash_function(algo: str) -> Callable[[object], bytes]:
    """The hash of an object under ``algo``, 32 bytes or 16. Raises ``ValueError`` for an unknown name."""
    form = _format(algo)

    def digest(value: object) -> bytes:
        made: bytes = form.hasher(form.dumps(value)).digest()
        return made

    return digest


def _format(algo: str) -> _Format:
    try:
        return _FORMATS[algo]
    except KeyError:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"hash algorithm {algo!r} cannot be reproduced; known: {known}") from None


def num_hash_blocks(num_tokens: int, scheme: HashScheme) -> int:
    """Number of hashes of a prompt of ``num_tokens``; a block's look-ahead tokens must exist too."""
    blocks = (num_tokens - scheme.lookahead) // scheme.hash_block_size
    return blocks if blocks > 0 else 0  # noqa: FURB136  # four calls less


if TYPE_CHECKING:
    _Words = array[int]
else:
    # Subscriptable only from Python 3.12 on.
    _Words = array


class PromptHashes(_Words):
    """The hashes of one prompt, unsigned 64 bits each, in one piece of memory.

    As a list of ints, garbage collection would visit each of a thousand objects. ``found`` is a cache for the
    code that looks them up: its result for the first hashes, with ``first(n)`` for fewer. It is shared with
    prompts that have the same prefix.
    """

    __slots__ = ("found",)
    found: Any

    def __new__(cls, hashes: Iterable[int] = (), found: Any = None) -> PromptHashes:
        made: PromptHashes = _Words.__new__(cls, "Q", hashes)  # type: ignore[assignment]
        made.found = found
        return made

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        """Compare as lists of numbers do."""
        return self.tolist() == (other.tolist() if isinstance(other, array) else other)

    def first(self, num_hashes: int) -> PromptHashes:
        """A copy of the first ``num_hashes`` hashes, for a prompt with the same prefix."""
        found = self.found
        made: PromptHashes = _Words.__new__(PromptHashes, "Q", self)  # type: ignore[assignment]
        del made[num_hashes:]
        made.found = None if found is None else found.first(num_hashes)
        return made


class HashChain(msgspec.Struct, eq=False, gc=False):
    """The hashes of one growing prompt; extending it hashes new blocks only.

    ``parent`` is the full hash before the first block; None for the seed's. ``hashes`` has the 64-bit forms,
    one per hash block. ``_whole`` has the full hashes, concatenated; the next block needs the last of them.
    """

    scheme: HashScheme
    extras: PromptExtras = NO_EXTRAS
    parent: bytes | None = None
    hashes: PromptHashes = msgspec.field(default_factory=PromptHashes)
    _whole: bytearray = msgspec.field(default_factory=bytearray)

    def fork(self, num_blocks: int) -> HashChain:
        """A new chain that starts with this one's first ``num_blocks`` blocks."""
        whole = self._whole[: self._digest_bytes() * num_blocks]
        return HashChain(self.scheme, self.extras, self.parent, self.hashes.first(num_blocks), whole)

    def cut(self, num_blocks: int) -> None:
        """Shorten this chain to its first ``num_blocks`` blocks: a ``fork`` without a copy of full hashes.

        ``hashes`` objects obtained before stay unchanged.
        """
        hashes, whole = self.hashes, self._whole
        if hashes:
            del whole[len(whole) // len(hashes) * num_blocks :]
        # Also of none: who has them would see those of the next turn.
        self.hashes = hashes.first(num_blocks)

    def _digest_bytes(self) -> int:
        return len(self._whole) // len(self.hashes) if self.hashes else 0

    def whole(self, start: int = 0) -> list[bytes]:
        """The full hashes of all blocks from number ``start`` on."""
        size = self._digest_bytes()
        return [bytes(self._whole[at : at + size]) for at in range(start * size, len(self._whole), size or 1)]

    def packed(self) -> tuple[HashScheme, int, memoryview]:
        """The chain as values: its scheme, the number of blocks, and the full hashes in one piece."""
        return self.scheme, len(self.hashes), memoryview(self._whole)

    @classmethod
    def unpacked(
        cls, scheme: HashScheme, num_blocks: int, whole: memoryview, extras: PromptExtras
    ) -> HashChain:
        """The chain of a prompt with these extras, from values of ``packed``."""
        copy = bytearray(whole)
        words = _words_of(copy, len(copy) // num_blocks, 0 if scheme.algo == SGLANG else -1)
        return cls(scheme, extras, None, PromptHashes(words), copy)

    def extend(self, token_ids: Sequence[int], skipped: int = 0) -> PromptHashes:
        """Hash the blocks of a prompt that are not hashed yet; returns all hashes. ``token_ids``: without the
        first ``skipped`` tokens, whose blocks are hashed.

        Raises ``ValueError`` for an unknown algorithm.
        """
        scheme, done = self.scheme, len(self.hashes)
        size, ahead = scheme.hash_block_size, scheme.lookahead
        more = (skipped + len(token_ids) - ahead) // size - done
        if more <= 0:
            return self.hashes
        start = done * size - skipped
        new = token_ids[start : start + more * size + ahead]
        if scheme.algo == SGLANG:
            self._extend_pages(new)
            return self.hashes
        each = more if more < _MANY_BLOCKS else self._first_plain_block(done, done + more) - done
        if each:
            self._extend_each(new, done, each)
        if each < more:
            self._extend_plain(new[each * size : more * size], done + each)
        return self.hashes

    def _extend_pages(self, new: Sequence[int]) -> None:
        """Hash pages as SGLang does."""
        page_bytes = 4 * self.scheme.hash_block_size
        # No tokenizer has ids of more bits; what an event or a client calls a token may have any.
        words = array("I", [token & _U32 for token in new])
        if self.scheme.lookahead:
            pairs = array("I", bytes(8 * (len(words) - 1)))
            pairs[::2], pairs[1::2] = words[:-1], words[1:]
            words, page_bytes = pairs, 2 * page_bytes
        if sys.byteorder == "big":
            words.byteswap()
        data, parent, made = words.tobytes(), self._last(), []
        for at in range(0, len(data), page_bytes):
            parent = hashlib.sha256(parent + data[at : at + page_bytes]).digest()
            made.append(parent)
        whole = b"".join(made)
        self._whole += whole
        self.hashes.extend(_words_of(whole, len(parent), 0))

    def _last(self) -> bytes:
        """The full hash that the next block's hash covers."""
        if not self.hashes and self.scheme.algo == SGLANG:
            return _page_root(self.extras)
        if not self.hashes:
            return self.parent or hash_function(self.scheme.algo)(self.scheme.seed)
        return bytes(self._whole[-self._digest_bytes() :])

    def _first_plain_block(self, done: int, total: int) -> int:
        """First block of a run without extra keys that is long enough to hash together; ``total`` if none."""
        extras, size = self.extras, self.scheme.hash_block_size
        plain = done
        if extras.lora_name is not None or self.scheme.lookahead:
            plain = total
        elif extras is not NO_EXTRAS:
            ends = (-(-(item.offset + item.length) // size) for item in extras.multimodal)
            plain = min(total, max(done, 1, *ends))
        return plain if total - plain >= _MANY_BLOCKS else total

    def _extend_each(self, new: Sequence[int], first: int, count: int) -> None:
        """Hash ``count`` blocks one by one, of which the first is the prompt's number ``first``."""
        scheme, extras, made = self.scheme, self.extras, []
        size, ahead = scheme.hash_block_size, scheme.lookahead
        form = _format(scheme.algo)
        dumps, hasher, pickle_dumps = form.dumps, form.hasher, pickle.dumps
        pickles, bare = dumps is pickled, not ahead and extras == NO_EXTRAS
        parent, extra, at = self._last(), None, 0
        blocks = new[: count * size]
        # ``struct`` unpacks an array faster than ``zip`` groups its items.
        for block in (
            struct.iter_unpack(f"{size}{blocks.typecode}", blocks)
            if isinstance(blocks, array)
            else zip(*[iter(blocks)] * size, strict=True)
        ):
            if not bare:
                at += size
                extra = _extra(new[at : at + ahead], first * size + at, scheme, extras)
            value = (parent, block, extra)
            # A call less for most.
            parent = hasher(pickle_dumps(value, 5) if pickles else dumps(value)).digest()
            made.append(parent)
        digests = b"".join(made)
        self._whole += digests
        self.hashes.extend(_words_of(digests, len(parent), -1))

    def _extend_plain(self, new: Sequence[int], first: int) -> None:
        size = self.scheme.hash_block_size
        found = _plain_hashes(new, size, self.scheme.algo, self._last())
        if found is None:
            self._extend_each(new, first, len(new) // size)
            return
        self._whole += found[0]
        self.hashes.frombytes(found[1])


def _page_root(extras: PromptExtras) -> bytes:
    """Return the bytes that SGLang hashes before the first page.

    The hashes of an adapter's pages cover an id that only SGLang's process knows
    (``kv_event_namespace_seed``): its name leads to hashes that no engine has.
    """
    if extras.lora_name is not None:
        return sha256(extras.lora_name.encode())
    return sha256(_SGLANG_SALT + extras.cache_salt.encode()) if extras.cache_salt else b""


def _words_of(whole: bytes | bytearray, digest_bytes: int, position: int) -> array[int]:
    """The eight bytes at ``position`` (0: the first, -1: the last) of each of these hashes, as big-endian
    numbers.
    """
    words = array("Q", whole)
    if sys.byteorder == "little":
        words.byteswap()
    per_hash = digest_bytes // words.itemsize
    return words[position % per_hash :: per_hash]


def _extra(
    ahead: Sequence[int], end: int, scheme: HashScheme, extras: PromptExtras
) -> tuple[Any, ...] | None:
    """The extra keys of the block before token ``end`` in hashed form, including its look-ahead tokens."""
    start = end - scheme.hash_block_size
    keys = extra_keys(extras, start, end + scheme.lookahead, tagged=scheme.tagged) or None
    return (keys, *ahead) if scheme.lookahead else keys


def extra_keys(extras: PromptExtras, start: int, end: int, *, tagged: bool = True) -> tuple[Any, ...]:
    """Extra keys of the block ``[start, end)``: LoRA, then multimodal items, then salt (first block only)."""
    keys: list[Any] = []
    if extras.lora_name is not None:
        name, path = _distinct(extras.lora_name), _distinct(extras.lora_path or "")
        keys.append(("lora", name, path) if tagged else name)
    for item in extras.multimodal:
        if item.offset < end and start < item.offset + item.length:
            identifier, offset = _distinct(item.identifier), item.offset - start
            keys.append(("mm", identifier, offset) if tagged else (identifier, offset))
    if start == 0 and extras.cache_salt:
        keys.append(("cache_salt", extras.cache_salt) if tagged else extras.cache_salt)
    return tuple(keys)


def _distinct(text: str) -> str:
    """An equal string that is a different object, so that pickle does not write a back reference."""
    return text.encode().decode() if len(text) > 1 else text


def block_hashes(
    token_ids: Sequence[int], scheme: HashScheme, extras: PromptExtras = NO_EXTRAS
) -> list[BlockHash]:
    return cast("list[BlockHash]", HashChain(scheme, extras).extend(token_ids).tolist())


# Larger numbers are serialized with other lengths.
_ID_MAX: Final = (1 << 31) - 1
# Shorter tuples have other frames (pickle's ``TUPLE1`` to ``TUPLE3``).
_BLOCK_TOKENS_MIN: Final = 4
# Numbers per call: below the size at which pickle begins another frame.
_CHUNK_TOKENS: Final = 8192


# The bytes before the parent's hash, between it and the tokens, and after the tokens.
_Around = tuple[bytes, bytes, bytes]


def _plain_hashes(
    token_ids: Sequence[int], size: int, algo: str, parent: bytes
) -> tuple[bytes, bytes] | None:
    """Hash blocks without extra keys at once, a quarter less time for a thousand; ``parent`` is the hash
    before the first.

    A block is hashed over ``dumps((parent, tokens, None))``. Only the parent's hash depends on the block
    before. One call of the same library therefore writes the tokens of many blocks, and the result is cut
    into blocks. The bytes around parent and tokens are copied from an example of the same length. The only
    knowledge of a format here is the length of a serialized number.

    Returns the full hashes, concatenated, and the last eight bytes of each as native numbers. None for ids or
    a block size that cannot be serialized so.
    """
    import numpy as np  # noqa: PLC0415  # not for those that only read hashes

    try:
        numbers = np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        return None
    if size < _BLOCK_TOKENS_MIN or numbers.min() < 0 or numbers.max() > _ID_MAX:
        return None
    form = _FORMATS[algo]
    hasher = form.hasher
    step = max(size, _CHUNK_TOKENS - _CHUNK_TOKENS % size)
    full: list[bytes] = []
    examples: dict[int, _Around] = {}
    for start in range(0, len(numbers), step):
        data, ends = _written(numbers[start : start + step], size, form)
        at = ends[0]
        for end in ends[1:]:
            body = data[at:end]
            around = examples.get(end - at)
            if around is None:
                block = token_ids[len(full) * size : (len(full) + 1) * size]
                around = examples[end - at] = _around(form, body, tuple(block), len(parent))
            before, between, after = around
            parent = hasher(before + parent + between + body + after).digest()
            full.append(parent)
            at = end
    words = len(parent) // 8
    whole = b"".join(full)
    return whole, np.frombuffer(whole, ">u8")[words - 1 :: words].astype(np.uint64).tobytes()


def _written(numbers: npt.NDArray[np.int64], size: int, form: _Format) -> tuple[bytes, list[int]]:
    """Serialize all numbers; returns the bytes, the offset of each block and the end of the last."""
    data = form.dumps(tuple(numbers.tolist()))
    lengths = 1 + 2 * (numbers >= 65536).astype("u1")
    for step in form.steps:
        lengths += numbers >= step
    ends = lengths.reshape(-1, size).sum(axis=1, dtype="i8").cumsum()
    begin = len(data) - form.tail - int(ends[-1])
    return data, [begin, *(ends + begin).tolist()]


def _around(form: _Format, body: bytes, block: tuple[int, ...], parent_bytes: int) -> _Around:
    """The bytes around parent and tokens, from one block that is serialized whole."""
    parent = b"\xfe" * parent_bytes
    before, _, rest = form.dumps((parent, block, None)).partition(parent)
    at = rest.index(body)
    return before, rest[:at], rest[at + len(body) :]
