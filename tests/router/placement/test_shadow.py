"""Shadows: an engine's own rules of retention and eviction, fed with the router's requests alone."""

from __future__ import annotations

import random

import pytest

from publisher.block_hash import HashScheme, block_hashes
from publisher.block_pool import HybridBlockPool
from publisher.events import BlockHash, GroupSpec
from router.placement.affinity import HashesOf, Shadow, ShadowPrompt, ShadowSpec, ShadowStats

HYBRID = (
    GroupSpec(0, "full_attention", 16),
    GroupSpec(1, "sliding_window", 16, sliding_window=64),
)
PLAIN = (GroupSpec(0, "full_attention", 16),)


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


@pytest.mark.parametrize("seed", range(10))
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


def test_a_prompt_larger_than_the_shadow_is_counted_and_leaves_it_usable() -> None:
    shadow, rng = Shadow(ShadowSpec(num_blocks=11)), random.Random(5)
    large, small = tokens(rng, 1000), tokens(rng, 100)
    shadow.served(large, hashes_of(large))
    assert shadow.stats.too_large == 1
    shadow.served(small, hashes_of(small))
    assert look(shadow, [*small, 1])[0] == 96


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
