"""Shadows: an engine's own rules of retention and eviction, fed with the router's requests alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import HashScheme, block_hashes
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.placement.shadow import (
    HashesOf,
    PoolEvidence,
    Shadow,
    ShadowPrompt,
    ShadowSettings,
    ShadowSpec,
    ShadowStats,
    estimated_spec,
)
from tests.support.examples import some

HYBRID = (
    GroupSpec(0, "full_attention", 16),
    GroupSpec(1, "sliding_window", 16, sliding_window=64),
)
PLAIN = (GroupSpec(0, "full_attention", 16),)


LOOKED_UP = [
    (GroupSpec(0, "full_attention", 16),),
    (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=64)),
    (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 64, sliding_window=128)),
    (GroupSpec(0, "full_attention", 64), GroupSpec(1, "sliding_window", 16, sliding_window=64)),
    (GroupSpec(0, "full_attention", 16), GroupSpec(1, "mamba", 64, mamba_cache_mode="align")),
    (
        GroupSpec(0, "full_attention", 16),
        GroupSpec(1, "chunked_local_attention", 16, attention_chunk_size=128),
    ),
    (GroupSpec(0, "sliding_window", 16, sliding_window=64),),
    (
        GroupSpec(0, "full_attention", 32),
        GroupSpec(1, "sliding_window", 16, sliding_window=64),
        GroupSpec(2, "sliding_window", 64, sliding_window=256),
    ),
]
"""Layouts with classes of other block sizes."""


def hashes_of(tokens: list[int]) -> HashesOf:
    def hashes(scheme: HashScheme) -> list[BlockHash]:
        return block_hashes(tokens, scheme)

    return hashes


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def look(shadow: Shadow, prompt: list[int]) -> tuple[int, int]:
    """Hit and shared prefix."""
    return shadow.lookup(ShadowPrompt(prompt, hashes_of(prompt)))


def test_a_served_prompt_is_a_hit_for_the_next_turn() -> None:
    prompt, stats = tokens(random.Random(1), 200), ShadowStats()
    shadow = Shadow(ShadowSpec(num_blocks=100), stats)
    assert look(shadow, prompt) == (0, 0)
    shadow.served(prompt, hashes_of(prompt))
    assert look(shadow, [*prompt, 1, 2, 3]) == (192, 192)
    assert look(shadow, prompt[:96]) == (80, 80)  # never the whole prompt
    assert stats.prompts == 1


def test_retention_leaves_a_shared_prefix_without_a_hit_until_the_junction_was_visited() -> None:
    rng, shadow = random.Random(2), Shadow(ShadowSpec(groups=HYBRID, num_blocks=200))
    system = tokens(rng, 320)
    first, second, third = (system + tokens(rng, 100) for _ in range(3))
    shadow.served(first, hashes_of(first))
    assert look(shadow, second) == (0, 320)
    shadow.served(second, hashes_of(second))
    assert look(shadow, third) == (320, 320)


def test_a_shadow_forgets_what_its_capacity_cannot_hold() -> None:
    rng, shadow = random.Random(3), Shadow(ShadowSpec(num_blocks=41))  # 640 tokens and the null block
    prompts = [tokens(rng, 200) for _ in range(5)]  # 13 blocks each: three fit
    for prompt in prompts:
        shadow.served(prompt, hashes_of(prompt))
    held = [look(shadow, prompt)[0] for prompt in prompts]
    assert held[0] == 0
    assert held[1] < 192  # its blocks went from the end, as the engine reuses them
    assert held[3] == held[4] == 192


@pytest.mark.parametrize("seed", some(range(10), 3))
@pytest.mark.parametrize("groups", [HYBRID, PLAIN], ids=["hybrid", "plain"])
def test_agrees_with_the_pool_of_the_engine_it_stands_for(groups: tuple[GroupSpec, ...], seed: int) -> None:
    """Same prompts, one at a time, no answers: equal predictions at every step, evictions included."""
    num_blocks = random.Random(seed).randint(40, 150)
    rng, shadow = (
        random.Random(seed),
        Shadow(ShadowSpec(groups=groups, num_blocks=num_blocks, chunk_tokens_max=128)),
    )
    scheme = HashScheme()
    truth = HybridBlockPool(groups, num_blocks=num_blocks, scheme=scheme, chunk_tokens_max=128)
    systems = [tokens(rng, 160) for _ in range(4)]
    hits = too_large = 0
    for _ in range(120):
        prompt = rng.choice(systems) + tokens(rng, rng.randint(10, 300))
        if rng.random() < 0.3:
            systems[rng.randrange(4)] = prompt[: rng.randint(100, len(prompt))]
        if groups is PLAIN and not len(prompt) % 16:
            prompt.append(1)  # else the pool has its last block twice
        predicted = look(shadow, prompt)
        request = truth.request(prompt)
        assert predicted == truth.find_prefix(request)
        shadow.served(prompt, hashes_of(prompt))
        if truth.start(request) is None:
            too_large += 1
            continue
        hits += predicted[0]
        while chunk := truth.next_chunk(request):
            assert truth.compute(request, chunk)
        truth.finish(request)
    assert hits > 0
    assert shadow.stats.too_large == too_large


@pytest.mark.parametrize("resets", [False, True])
def test_look_ups_in_turns_find_the_same_but_after_a_reset(resets: bool) -> None:
    prompt = list(range(5_000))
    shadows = [Shadow(ShadowSpec()) for _ in range(200)]
    for shadow in shadows[::2]:
        shadow.served(prompt, hashes_of(prompt))
    asked = ShadowPrompt(prompt, hashes_of(prompt))
    assert len(list(asked.look_ahead([*shadows, None]))) == 4, "fifty of them a step"
    before = [shadow.lookup(asked) for shadow in shadows]
    for shadow in shadows if resets else ():
        shadow.reset()
    for shadow in () if resets else shadows:
        shadow.served(prompt[:1600], hashes_of(prompt[:1600]))
    found = [asked.found_in(shadow) for shadow in shadows]
    assert found == ([(0, 0)] * 200 if resets else before)


@pytest.mark.parametrize("seed", some(range(4), 2))
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("groups", LOOKED_UP)
def test_a_look_up_by_hashes_finds_what_a_request_finds(
    groups: tuple[GroupSpec, ...], eagle: bool, seed: int
) -> None:
    """It reads no more of a prompt than is held; small pools, so that blocks in the middle are gone."""
    rng = random.Random(seed)
    if eagle:
        groups = tuple(
            msgspec.structs.replace(one, is_eagle=True) if one.kind != "mamba" else one for one in groups
        )
    scheme = HashScheme(hash_block_size=math.gcd(*(group.block_size for group in groups)))
    try:
        pool = HybridBlockPool(groups, num_blocks=300, scheme=scheme, retention_interval=0, events=False)
    except ValueError:
        pytest.skip("vLLM does not run it")
    stems = [tokens(rng, 600) for _ in range(3)]
    seen = 0
    for _ in range(60):
        prompt = rng.choice(stems)[: rng.randrange(1, 600)] + tokens(rng, rng.randrange(1, 200))
        hashes = list(hashes_of(prompt)(scheme))
        request = pool.request(prompt, hashes=hashes)
        found = pool.find_prefix(request)
        seen += found[1] > 0
        assert pool.find_prefix_of(hashes, len(prompt)) == found
        if pool.start(request) is not None:
            while (chunk := pool.next_chunk(request)) > 0 and pool.compute(request, chunk):
                pass
            pool.finish(request)
    assert seen > 10


class Counted(list[BlockHash]):
    """Hashes that count how many of them are copied."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("groups", [groups for groups in LOOKED_UP if groups[0].kind == "full_attention"])
@pytest.mark.parametrize("held", [0, 1, 70])
def test_a_look_up_reads_what_is_held_and_no_more(groups: tuple[GroupSpec, ...], held: int) -> None:
    """A prompt of 256,000 tokens, of which the pool holds this many blocks of 64 tokens."""
    scheme = HashScheme(hash_block_size=math.gcd(*(group.block_size for group in groups)))
    pool = HybridBlockPool(groups, num_blocks=3000, scheme=scheme, retention_interval=None, events=False)
    prompt = list(range(256_000))
    hashes = Counted(hashes_of(prompt)(scheme))
    if held:
        request = pool.request(prompt[: 64 * held + 1], hashes=list(hashes))
        assert pool.start(request) is not None
        while (chunk := pool.next_chunk(request)) > 0:
            assert pool.compute(request, chunk)
        pool.finish(request)
    hashes.copied = 0
    hit, shared = pool.find_prefix_of(hashes, len(prompt))
    assert hit <= shared
    assert (shared > 0) == (held > 0)
    assert hashes.copied <= 1_500


def test_a_prompt_larger_than_the_shadow_is_counted_and_leaves_it_usable() -> None:
    shadow, rng = Shadow(ShadowSpec(num_blocks=11)), random.Random(5)
    large, small = tokens(rng, 1000), tokens(rng, 100)
    shadow.served(large, hashes_of(large))
    assert shadow.stats.too_large == 1
    shadow.served(small, hashes_of(small))
    assert look(shadow, [*small, 1])[0] == 96


def test_a_long_prompt_is_taken_in_chunk_by_chunk_and_a_reset_ends_it() -> None:
    rng, steps = random.Random(7), list[Callable[[], None]]()
    shadow = Shadow(ShadowSpec(groups=HYBRID, num_blocks=400, chunk_tokens_max=128), later=steps.append)
    whole = Shadow(ShadowSpec(groups=HYBRID, num_blocks=400, chunk_tokens_max=128))
    first, second = tokens(rng, 1000), tokens(rng, 300)
    for prompt in (first, second):
        shadow.served(prompt, hashes_of(prompt))
        whole.served(prompt, hashes_of(prompt))
    while steps:
        assert len(steps) == 1
        steps.pop()()
    assert [look(shadow, [*one, 1]) for one in (first, second)] == [(992, 992), (288, 288)]
    assert [look(whole, [*one, 1]) for one in (first, second)] == [(992, 992), (288, 288)]
    third = tokens(rng, 1000)
    shadow.served(third, hashes_of(third))
    shadow.reset()
    assert look(shadow, [*third, 1]) == look(shadow, [*first, 1]) == (0, 0)
    shadow.served(second, hashes_of(second))
    while steps:
        steps.pop()()
    assert look(shadow, [*second, 1]) == (288, 288)
    for _ in range(100):
        shadow.served(third, hashes_of(third))
    assert shadow.stats.skipped > 0


def test_a_reset_empties() -> None:
    shadow, prompt = Shadow(ShadowSpec()), tokens(random.Random(6), 100)
    shadow.served(prompt, hashes_of(prompt))
    assert look(shadow, prompt) != (0, 0)
    shadow.reset()
    assert look(shadow, prompt) == (0, 0)
    assert "num_blocks" in shadow.spec.assumed
    assert look(shadow, []) == (0, 0)


def test_look_ahead_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="look ahead"):
        Shadow(ShadowSpec(scheme=HashScheme(lookahead=1)))


STATED = EngineStatement(source="metrics", block_size=128)
STATES = EngineStatement(
    source="metrics", attention_block_size=544, mamba_cache_mode="align", mamba_block_size=544, block_size=544
)
PAGES = EngineStatement(source="server_info", kind="sglang", attention_block_size=1)
DRAFTS = EngineStatement(source="server_info", drafts=True, method="eagle3", block_size=16)
Known = dict[str, Any]


def spec_of(given: ShadowSettings | None = None, *statements: EngineStatement, **known: Any) -> ShadowSpec:
    evidence = PoolEvidence(setup=SetupEvidence(statements=statements), **known)
    return estimated_spec(given or ShadowSettings(), evidence)


def kinds_of(spec: ShadowSpec) -> list[tuple[str, int, int | None]]:
    return [(group.kind, group.block_size, group.sliding_window) for group in spec.groups]


FULL = ("full_attention", 16, None)
WINDOWED = ("sliding_window",) * 5 + ("full_attention",)


@pytest.mark.parametrize(
    ("given", "statements", "known", "groups", "blocks", "assumed"),
    [
        (None, (), {}, [FULL], 16_384, ("block_size", "num_blocks")),
        (None, (STATED,), {"pool_blocks": 200}, [("full_attention", 128, None)], 200, ()),
        (None, (STATED,), {}, [("full_attention", 128, None)], 16_384, ("num_blocks",)),
        (ShadowSettings(block_size=32), (STATED,), {"pool_blocks": 9}, [("full_attention", 32, None)], 9, ()),
        (ShadowSettings(num_blocks=100_000), (), {"pool_blocks": 9}, [FULL], 100_000, ("block_size",)),
        (None, (), {"pool_blocks": 1_000_000}, [FULL], 65_536, ("block_size",)),
        (None, (PAGES,), {"pool_blocks": 160_000}, [FULL], 10_000, ()),
        (
            None,
            (),
            {"pool_blocks": 900, "kinds": WINDOWED, "window": 512},
            [("sliding_window", 16, 512)] * 5 + [FULL],
            900,
            ("block_size",),
        ),
        (None, (), {"kinds": WINDOWED}, [FULL], 16_384, ("block_size", "num_blocks")),
        (
            ShadowSettings(sliding_window=64),
            (),
            {"kinds": WINDOWED, "window": 512},
            [FULL, ("sliding_window", 16, 64)],
            16_384,
            ("block_size", "num_blocks"),
        ),
        (
            None,
            (STATES,),
            {"pool_blocks": 50},
            [("full_attention", 544, None), ("mamba", 544, None)],
            50,
            (),
        ),
    ],
)
def test_the_size_is_what_configuration_engine_and_model_tell(
    given: ShadowSettings | None,
    statements: tuple[EngineStatement, ...],
    known: Known,
    groups: list[Any],
    blocks: int,
    assumed: tuple[str, ...],
) -> None:
    spec = spec_of(given, *statements, **known)
    assert (kinds_of(spec), spec.num_blocks, spec.assumed) == (groups, blocks, assumed)
    Shadow(spec)


def test_a_drafter_drops_its_block_in_a_shadow_too() -> None:
    shadow, prompt = Shadow(spec_of(None, DRAFTS)), tokens(random.Random(6), 100)
    shadow.served(prompt, hashes_of(prompt))
    assert look(shadow, [*prompt, 1])[0] == 80


class TrueEngine:
    """An engine's own pool, with generated tokens and the prompts of others, which no router sees."""

    def __init__(self, groups: tuple[GroupSpec, ...], num_blocks: int, rng: random.Random) -> None:
        self._scheme = HashScheme(hash_block_size=groups[0].block_size)
        self._pool = HybridBlockPool(
            groups, num_blocks=num_blocks, scheme=self._scheme, chunk_tokens_max=2048
        )
        self._rng = rng

    def serve(self, prompt: list[int], generated: int = 0) -> int:
        """Return the hit."""
        request = self._pool.request(prompt)
        hit = self._pool.find_prefix(request)[0]
        if self._pool.start(request) is None:
            return 0
        while chunk := self._pool.next_chunk(request):
            assert self._pool.compute(request, chunk)
        self._pool.finish(request)
        if generated:
            self.serve([*prompt, *tokens(self._rng, generated)])
        return hit

    def others(self) -> None:
        """Serve a prompt of another client."""
        self.serve(tokens(self._rng, 400))


def over(
    groups: tuple[GroupSpec, ...], num_blocks: int, *, busy: float, seed: int, **known: Any
) -> list[bool]:
    """Whether predictions were too high: conversations of several turns and single prompts, in any order."""
    rng = random.Random(seed)
    engine, shadow = TrueEngine(groups, num_blocks, rng), Shadow(spec_of(None, **known))
    systems, found = [tokens(rng, 512) for _ in range(3)], []
    chats = [rng.choice(systems) + tokens(rng, 200) for _ in range(8)]
    for _ in range(240):
        at = rng.randrange(len(chats))
        prompt = chats[at]
        predicted, actual = look(shadow, prompt)[0], engine.serve(prompt, rng.randrange(40))
        shadow.served(prompt, hashes_of(prompt))
        found.append(predicted > actual)
        shadow.reported(predicted, actual)
        long = len(prompt) > 1500
        chats[at] = (rng.choice(systems) if long else prompt) + tokens(rng, rng.randrange(60, 240))
        if rng.random() < busy:
            engine.others()
    return found


LAYOUTS = {
    "full": ((GroupSpec(0, "full_attention", 16),), {}),
    "full, large blocks": ((GroupSpec(0, "full_attention", 128),), {}),
    "windows": (
        (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=64)),
        {"kinds": ("full_attention", "sliding_window"), "window": 64},
    ),
}


@pytest.mark.parametrize("busy", some([0.7, 0.0], 2))
@pytest.mark.parametrize("pool_tokens", [6_000, 40_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_receipts_correct_a_shadow_of_which_nothing_is_known(
    layout: str, pool_tokens: int, busy: float
) -> None:
    """The assumed pool is 262,144 tokens in blocks of 16."""
    groups, known = LAYOUTS[layout]
    blocks = pool_tokens // groups[0].block_size
    latest = over(groups, blocks, busy=busy, seed=0, **known)[120:]
    assert sum(latest) <= 0.12 * len(latest)


@pytest.mark.parametrize("pool_tokens", [6_000, 40_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shadow_of_stated_size_is_seldom_too_high_from_the_first_prompt(
    layout: str, pool_tokens: int
) -> None:
    groups, known = LAYOUTS[layout]
    size = groups[0].block_size
    blocks = pool_tokens // size
    stated = EngineStatement(source="metrics", block_size=size)
    evidence: Known = {"setup": SetupEvidence(statements=(stated,)), "pool_blocks": blocks, **known}
    rng = random.Random(1)
    engine, shadow = (
        TrueEngine(groups, blocks, rng),
        Shadow(estimated_spec(ShadowSettings(), PoolEvidence(**evidence))),
    )
    wrong = 0
    prompts = [tokens(rng, 800) for _ in range(12)]
    for _ in range(100):
        prompt = rng.choice(prompts) + tokens(rng, 50)
        predicted, actual = look(shadow, prompt)[0], engine.serve(prompt)
        shadow.served(prompt, hashes_of(prompt))
        shadow.reported(predicted, actual)
        wrong += predicted > actual
    assert wrong <= 2


def test_a_stated_size_ends_the_assumption_and_an_equal_one_changes_nothing() -> None:
    shadow, prompt = Shadow(spec_of()), tokens(random.Random(6), 300)
    shadow.served(prompt, hashes_of(prompt))
    assert not shadow.size(spec_of())
    assert look(shadow, prompt)[0]
    assert shadow.size(spec_of(None, STATED, pool_blocks=10))
    assert look(shadow, prompt)[0] == 0
    shadow.served(prompt, hashes_of(prompt))
    assert (look(shadow, prompt)[0], shadow.num_blocks, shadow.assumed) == (256, 10, ())
