"""Shadows: the assumed cache of an engine without events, from the router's own requests to it.

A shadow is a block pool of the engine's groups and size (publisher/block_pool.py, without events) that
receives every prompt the router sent there: allocation, LRU eviction and retention are the engine's own
rules, so a shadow evicts what the engine evicts. A history without eviction would not; its hits, and with
them the load account, would become ever more wrong.

Its size is configured, else what the engine's metrics state, with the windows of the model's ``config.json``
(``estimated_spec``); what none of them tells is assumed (``ShadowSpec.assumed``), and learned from receipts:
the block size as the common divisor of reported hits, and how much of the pool other clients and generated
tokens leave to this router's prompts (``PoolEstimate``). So its hits are an estimate (confidence "shadow").

One group of full attention, the usual case, needs no block pool (``_PrefixLru``): that takes a tenth of the
time, and answers the same (tests/router/placement/test_shadow.py).

A prompt is applied whole, once, when its prefill is over or its answer has ended; until then it counts
through ``inflight.py``. Invariants: a shadow holds at most ``num_blocks`` blocks, and no request stays open.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Annotated, Final

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.index.learn.facts import DropReceipts, SetupEvidence, find_facts
from kvatlas.router.index.learn.layout import ModelFacts, retained_tokens

HashesOf = Callable[[HashScheme], Sequence[BlockHash]]
"""The prompt's block hashes under a scheme (``Prompt.hashes``)."""

# Of one shadow, unless configured: a million tokens in blocks of 16, some 12 MB when full.
BLOCKS_MAX: Final = 65_536
# Smaller blocks, such as SGLang's pages of one token, are counted in units of this size: hits are at most
# this much too low, and a prompt has one hash for each.
BLOCK_TOKENS_MIN: Final = 16
# A larger common divisor of hits is chance: few prompts were repeated.
_BLOCK_TOKENS_MAX: Final = 1024
# Different hits whose common divisor is taken for the block size: of multiples of a block, four have a
# larger one in one case of twelve, and then the next hit corrects it.
_HITS_MIN: Final = 4
# A prediction that was too high by evictions takes an eighth of the pool, any other one gives back a little:
# about one in 32 stays too high where others use the engine.
_SHRINK: Final = 7 / 8
_GROW: Final = 1 + 1 / 256
# Prompts of one shadow that are being taken in, each with its hashes.
_WAITING_MAX: Final = 64
# Looked up in one step of the loop, as a prompt's tokens times the shadows: some 2 ms where a pool holds all
# of them, or 80 shadows hold a prompt of 3,000 tokens.
SHADOW_TOKENS_MAX: Final = 250_000
# A pool of several groups is made again, and empty, if its size has changed by this factor.
_REBUILT_FROM: Final = 4 / 3


class ShadowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool of an engine; the defaults are vLLM's where vLLM has one.

    ``assumed`` names the fields that nothing stated, for explanations and the doctor.
    """

    groups: tuple[GroupSpec, ...] = (GroupSpec(0, "full_attention", BLOCK_TOKENS_MIN),)
    num_blocks: int = 16_384
    """No default in vLLM (it depends on free memory): 262,144 tokens at block size 16, a small engine. A
    shadow that is too small evicts early and loses hits; one that is too large promises hits that are gone.
    """
    scheme: HashScheme = HashScheme()
    """Any scheme distinguishes prefixes; the one with which the router hashes prompts anyway costs
    nothing."""
    retention_interval: int | None = 0
    chunk_tokens_max: int = 8192
    assumed: tuple[str, ...] = ("block_size", "num_blocks")

    @property
    def block_size(self) -> int:
        """Tokens per block of its first group."""
        return self.groups[0].block_size


class ShadowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the block pool of engines without events. Not set: as the engine's metrics and the model's
    `config.json` state; what neither tells is assumed, and corrected by the engine's answers."""

    num_blocks: int | None = None
    """Blocks of the engine's KV cache, all groups together; vLLM logs it at start. Set it if the engine's
    metrics are not reachable."""
    block_size: int | None = None
    """Tokens per block. Set it if the engines have a `--block-size` that their metrics do not show."""
    sliding_window: int | None = None
    """Adds a sliding-window group of this many tokens to the full-attention group. Set it for models with
    such layers whose `config.json` is not readable here."""


class PoolEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of the pool of an engine without events. Sizes in tokens; None: not known."""

    setup: SetupEvidence = SetupEvidence()
    facts: ModelFacts = ModelFacts()
    """Configured ones, completed by the model's file."""
    pool_blocks: int | None = None
    kinds: tuple[str, ...] = ()
    """Kinds of the groups that the layers of the model's ``config.json`` make."""
    window: int | None = None


def estimated_spec(given: ShadowSettings, known: PoolEvidence | None = None) -> ShadowSpec:
    """Return the pool by configuration, statements and the model's file. Raises ``ValueError`` for a
    configured one that vLLM would not run; other evidence is left out then."""
    known = known or PoolEvidence()
    stated = [size for one in known.setup.statements if (size := one.attention_block_size or one.block_size)]
    size = next(iter(stated), None) if given.block_size is None else given.block_size
    blocks = known.pool_blocks if given.num_blocks is None else given.num_blocks
    assumed = [name for name, value in (("block_size", size), ("num_blocks", blocks)) if value is None]
    size = BLOCK_TOKENS_MIN if size is None else size
    blocks = ShadowSpec().num_blocks if blocks is None else blocks
    if size < BLOCK_TOKENS_MIN and given.block_size is None:
        size, blocks = BLOCK_TOKENS_MIN, blocks * size // BLOCK_TOKENS_MIN
    if given.num_blocks is None:
        blocks = max(2, min(blocks, BLOCKS_MAX))
    plain = (GroupSpec(0, "full_attention", size),)
    if given.sliding_window is not None:
        window = GroupSpec(1, "sliding_window", size, sliding_window=given.sliding_window)
        return _spec((*plain, window), size, blocks, known, assumed)
    groups = tuple(_groups(known, size))
    if groups:
        spec = _spec(groups, size, blocks, known, assumed)
        try:
            Shadow(msgspec.structs.replace(spec, num_blocks=2))
        except ValueError:
            pass
        else:
            return spec
    return _spec(plain, size, blocks, known, assumed)


def _groups(known: PoolEvidence, size: int) -> Iterable[GroupSpec]:
    """Yield the groups by the model's file, and one of Mamba states if the engine states how it keeps them;
    none if a size is missing."""
    chunk = known.facts.attention_chunk_size
    mode, state = known.facts.mamba_cache_mode, known.facts.mamba_block_size
    for stated in known.setup.statements:
        mode, state = mode or stated.mamba_cache_mode, state or stated.mamba_block_size
    kinds = known.kinds or (("full_attention", "mamba") if mode else ())
    if ("sliding_window" in kinds and not known.window) or ("chunked_local_attention" in kinds and not chunk):
        return
    for idx, kind in enumerate(kinds):
        if kind == "mamba":
            yield GroupSpec(idx, kind, state or size, mamba_cache_mode=mode)
        else:
            window = known.window if kind == "sliding_window" else None
            local = chunk if kind == "chunked_local_attention" else None
            yield GroupSpec(idx, kind, size, sliding_window=window, attention_chunk_size=local)


def _spec(
    groups: tuple[GroupSpec, ...], size: int, blocks: int, known: PoolEvidence, assumed: Sequence[str]
) -> ShadowSpec:
    facts, _ = find_facts(known.facts, known.setup, DropReceipts(), groups, 0)
    groups = tuple(
        msgspec.structs.replace(group, is_eagle=facts.is_eagle(group.group_idx)) for group in groups
    )
    return ShadowSpec(
        groups=groups,
        num_blocks=blocks,
        scheme=HashScheme(hash_block_size=math.gcd(*(group.block_size for group in groups))),
        retention_interval=retained_tokens(facts.retention_interval) if len(groups) > 1 else 0,
        assumed=tuple(assumed),
    )


class ShadowStats(msgspec.Struct):
    """Counters for metrics."""

    prompts: Annotated[int, "kvatlas_shadow_prompts_total"] = 0
    """Prompts entered into the assumed caches of engines without events."""
    too_large: Annotated[int, "kvatlas_shadow_too_large_total"] = 0
    """Prompts larger than the whole shadow: its size is set too small."""
    skipped: Annotated[int, "kvatlas_shadow_skipped_total"] = 0
    """Prompts that were not entered because too many long ones were being entered."""
    resized: Annotated[int, "kvatlas_shadow_resized_total"] = 0
    """Shadows that got another block size or pool by their engines' statements or answers."""


class ShadowPrompt:
    """One prompt for look-ups in shadows; made once for all of them."""

    __slots__ = ("_found", "_hashes", "_hashes_of", "token_ids")

    def __init__(self, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        self.token_ids = token_ids
        self._hashes_of = hashes_of
        self._hashes: dict[HashScheme, list[BlockHash]] = {}
        self._found: dict[tuple[int, int], tuple[int, int]] = {}

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        """Return the prompt's hashes under this scheme."""
        hashes = self._hashes.get(scheme)
        if hashes is None:
            hashes = self._hashes[scheme] = list(self._hashes_of(scheme))
        return hashes

    def found_in(self, shadow: Shadow) -> tuple[int, int]:
        """Return hit and shared prefix in a shadow, in tokens: looked up, or what ``look_ahead`` found."""
        return self._found.get((id(shadow), shadow.resets)) or shadow.lookup(self)

    def look_ahead(self, shadows: Iterable[Shadow | None]) -> Generator[None, None, None]:
        """Look the prompt up in these shadows, a part of them a step. Updates that arrive meanwhile are
        ignored, except a reset."""
        looked = 0
        for shadow in shadows:
            if shadow is not None:
                self._found[id(shadow), shadow.resets] = shadow.lookup(self)
                looked += len(self.token_ids)
            if looked >= SHADOW_TOKENS_MAX:
                looked = 0
                yield


Serving = Generator[None, None, bool]
"""Takes a prompt in: what is there already, each chunk, and its end are a step each; whether it fitted."""


class _Pool:
    """A block pool that computes whole prompts, one after the other."""

    __slots__ = ("_pool", "_spec", "num_blocks")

    def __init__(self, spec: ShadowSpec) -> None:
        self._spec = spec
        self._make(spec.num_blocks)

    def _make(self, num_blocks: int) -> None:
        spec, self.num_blocks = self._spec, num_blocks
        self._pool = HybridBlockPool(
            spec.groups,
            num_blocks=num_blocks,
            scheme=spec.scheme,
            retention_interval=spec.retention_interval,
            chunk_tokens_max=spec.chunk_tokens_max,
            events=False,
        )

    def reset(self) -> None:
        self._pool.reset()

    @property
    def used_blocks(self) -> int:
        return self.num_blocks

    def limit(self, num_blocks: int) -> None:
        """Change the number of blocks; an empty pool takes its place, unless the change is small."""
        fewer, more = sorted((num_blocks, self.num_blocks))
        if fewer * _REBUILT_FROM < more or (num_blocks == self._spec.num_blocks != self.num_blocks):
            self._make(num_blocks)

    def lookup(self, num_tokens: int, hashes: list[BlockHash]) -> tuple[int, int]:
        return self._pool.find_prefix_of(hashes, num_tokens)

    def serve(self, num_tokens: int, hashes: list[BlockHash]) -> Serving:
        pool = self._pool
        # The hashes say it all.
        request = pool.request([0] * num_tokens, hashes=hashes)
        if pool.start(request) is None:
            return False
        try:
            served, steps = True, num_tokens > self._spec.chunk_tokens_max
            if steps:
                yield
            while served and (chunk := pool.next_chunk(request)) > 0:
                served = pool.compute(request, chunk)
                if steps:
                    yield
        finally:
            pool.finish(request)
        return served


class _PrefixLru:
    """The same for one group of full attention: its hashes in the order in which they will be evicted.

    A prompt's blocks are freed last block first, so a block is never held without those before it, and a hit
    is found by halving. Differs from the pool by one copy: vLLM computes the last block of a prompt of whole
    blocks again, and keeps both until the old one is evicted.
    """

    __slots__ = ("_block_size", "_blocks_max", "_held")

    def __init__(self, spec: ShadowSpec) -> None:
        # Raises for what a pool of this kind cannot be.
        HybridBlockPool(spec.groups, num_blocks=min(spec.num_blocks, 2), scheme=spec.scheme, events=False)
        self._block_size = spec.groups[0].block_size
        self._blocks_max = spec.num_blocks - 1  # but the null block
        self._held: OrderedDict[BlockHash, None] = OrderedDict()
        self.reset()

    def reset(self) -> None:
        self._held.clear()

    @property
    def used_blocks(self) -> int:
        return len(self._held) + 1

    def limit(self, num_blocks: int) -> None:
        """Change the number of blocks."""
        self._blocks_max = num_blocks - 1
        self._evict(self._blocks_max)

    def _evict(self, room: int) -> None:
        held = self._held
        for _ in range(len(held) - room):
            held.popitem(last=False)

    def lookup(self, num_tokens: int, hashes: list[BlockHash]) -> tuple[int, int]:
        held, low, high = self._held, 0, (num_tokens - 1) // self._block_size
        if high and hashes[high - 1] in held:
            low = high
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low * self._block_size, low * self._block_size

    def serve(self, num_tokens: int, hashes: list[BlockHash]) -> Serving:
        yield from ()
        whole, rest = divmod(num_tokens, self._block_size)
        room = self._blocks_max - (rest > 0)
        if whole > room:
            return False
        held = self._held
        known = self.lookup(num_tokens, hashes)[0] // self._block_size
        held.update(dict.fromkeys(hashes[known:whole]))
        # Moves each to the end, the last block first.
        deque(map(held.move_to_end, reversed(hashes[:whole])), maxlen=0)
        self._evict(room)
        return True


class PoolEstimate:
    """Knowledge of a pool from receipts: the common divisor of its hits, and the blocks that they confirm."""

    __slots__ = ("_hits", "blocks", "unit")

    def __init__(self, blocks: float) -> None:
        self.blocks = blocks
        """Number of blocks that this router's prompts have, at most those of the pool."""
        self.unit = 0
        """Common divisor of the hits, in tokens; 0: no hit yet."""
        self._hits: set[int] = set()

    @property
    def block_size(self) -> int | None:
        """Block size that the hits show; None: too few."""
        known = len(self._hits) >= _HITS_MIN and BLOCK_TOKENS_MIN <= self.unit <= _BLOCK_TOKENS_MAX
        return self.unit if known else None

    def add(self, predicted: int, actual: int, *, used_blocks: int, blocks_max: int, step: int) -> None:
        """Count a report. ``step``: smallest error in tokens that only evictions explain."""
        if actual:
            self.unit = math.gcd(self.unit, actual)
            if len(self._hits) < _HITS_MIN:
                self._hits.add(actual)
        if predicted - actual >= step:
            self.blocks = max(2.0, min(self.blocks, used_blocks) * _SHRINK)
        else:
            self.blocks = min(blocks_max, self.blocks * _GROW)


class Shadow:
    """The shadow of one engine.

    Raises ``ValueError`` for groups that vLLM would not run, and for a scheme with look-ahead, which would
    miss the hashes of a prompt's last blocks. ``stats`` may be shared. ``later`` runs a step of a long prompt
    after what waits already (a pool takes some 35 lines of Python per block); without it there is one step.
    """

    __slots__ = ("_cache", "_estimate", "_later", "_stated", "_waiting", "resets", "spec", "stats")

    def __init__(
        self,
        spec: ShadowSpec,
        stats: ShadowStats | None = None,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        if spec.scheme.lookahead:
            raise ValueError("a shadow's hash scheme cannot look ahead")
        self.stats = stats if stats is not None else ShadowStats()
        self._stated = spec
        self._estimate = PoolEstimate(spec.num_blocks)
        self._later = later
        self._waiting: deque[Serving] = deque()
        self.resets = 0
        """Grows when it is emptied."""
        self._make(spec)

    def _make(self, spec: ShadowSpec) -> None:
        self._waiting.clear()
        self.resets += 1
        self.spec = spec
        """With the block size that receipts show."""
        is_plain = (
            len(spec.groups) == 1
            and spec.groups[0].family is Family.FULL
            and not spec.groups[0].is_eagle
            and spec.groups[0].block_size == spec.scheme.hash_block_size
        )
        self._cache = _PrefixLru(spec) if is_plain else _Pool(spec)

    @property
    def num_blocks(self) -> int:
        """Blocks that it may hold now."""
        return min(self.spec.num_blocks, int(self._estimate.blocks))

    @property
    def assumed(self) -> tuple[str, ...]:
        """Sizes that neither configuration nor engine nor receipts tell."""
        learned = {"block_size"} if self._estimate.block_size is not None else set[str]()
        return tuple(name for name in self._stated.assumed if name not in learned)

    def size(self, spec: ShadowSpec) -> bool:
        """Take the size that is known now. Returns whether it changed: then it is empty."""
        if spec == self._stated:
            return False
        self._stated, self._estimate = spec, PoolEstimate(spec.num_blocks)
        self._make(spec)
        self.stats.resized += 1
        return True

    def lookup(self, prompt: ShadowPrompt) -> tuple[int, int]:
        """Return hit and shared prefix of a prompt, in tokens; changes nothing."""
        if not len(prompt.token_ids):
            return 0, 0
        return self._cache.lookup(len(prompt.token_ids), prompt.hashes(self.spec.scheme))

    def served(self, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        """Apply a prompt that the engine has computed."""
        if not len(token_ids):
            return
        self.stats.prompts += 1
        if len(self._waiting) >= _WAITING_MAX:
            self.stats.skipped += 1
            return
        self._waiting.append(self._cache.serve(len(token_ids), list(hashes_of(self.spec.scheme))))
        if len(self._waiting) == 1:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            try:
                next(self._waiting[0])
            except StopIteration as end:
                self._waiting.popleft()
                self.stats.too_large += not end.value
            if self._waiting and self._later is not None:
                self._later(self._go_on)
                return

    def reported(self, predicted: int, actual: int) -> bool:
        """Correct the estimate by an engine's report on a prompt that was predicted here. Returns whether the
        block size changed: then it is empty."""
        spec, estimate = self.spec, self._estimate
        guessed = "block_size" in self._stated.assumed
        # A drafter may drop one block of each hit.
        step = _BLOCK_TOKENS_MAX if guessed and estimate.block_size is None else 2 * spec.block_size
        if not actual:
            step = spec.block_size
        used = self._cache.used_blocks
        estimate.add(predicted, actual, used_blocks=used, blocks_max=spec.num_blocks, step=step)
        size = estimate.block_size
        if guessed and size is not None and size != spec.block_size and len(spec.groups) == 1:
            blocks = self._stated.num_blocks
            if "num_blocks" in self._stated.assumed:
                blocks = max(2, blocks * self._stated.block_size // size)
            group = msgspec.structs.replace(spec.groups[0], block_size=size)
            scheme = HashScheme(hash_block_size=size)
            self._make(msgspec.structs.replace(spec, groups=(group,), scheme=scheme, num_blocks=blocks))
            estimate.blocks = blocks
            self.stats.resized += 1
            return True
        self._cache.limit(self.num_blocks)
        return False

    def reset(self) -> None:
        """Empty the shadow: the engine restarted, or its prefix cache was reset."""
        for serving in self._waiting:
            serving.close()
        self.resets += 1
        self._waiting.clear()
        self._cache.reset()
