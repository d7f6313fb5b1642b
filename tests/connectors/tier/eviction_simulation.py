"""How many prompt tokens each eviction policy saves, on seeded traffic over a hybrid layout.

``python -m tests.connectors.tier.eviction_simulation`` prints the table in
``kvatlas.connectors.tier.eviction``.
One request after the other asks the tier alone for a prefix (nothing stays in a GPU), loads it, and stores
what it computed: 5 window groups of 128 tokens and 1 full group, blocks of 16 tokens, tails at every block.
Traffic: 45 % next turns of conversations, 35 % new conversations on one of 12 shared system prompts, 20 %
prompts never seen again. Deterministic: the same seed gives the same table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.tier.base import block_key
from kvatlas.connectors.tier.eviction import POLICY_NAMES, make_policy
from kvatlas.connectors.tier.host import HostTier

BLOCK = 16
WINDOW_BLOCKS = 8
WINDOWS = (0, 1, 2, 3, 4)
FULL = 5
SHAPES = (
    *(GroupShape(g, GroupKind.WINDOW, BLOCK, WINDOW_BLOCKS * BLOCK) for g in WINDOWS),
    GroupShape(FULL, GroupKind.FULL, BLOCK),
)
REQUESTS = 1500
SYSTEM_PROMPTS = 12


@dataclass(frozen=True)
class Outcome:
    """Tokens over all requests."""

    prompt_tokens: int
    hit_tokens: int

    @property
    def share(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class Traffic:
    """Prompts as lists of block hashes; blocks with equal prefixes have equal hashes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made = 0
        self._systems = [self._blocks(self._random.randint(16, 64)) for _ in range(SYSTEM_PROMPTS)]
        self._open: list[list[bytes]] = []

    def _blocks(self, count: int) -> list[bytes]:
        self._made += count
        return [i.to_bytes(8, "big") for i in range(self._made - count, self._made)]

    def next_prompt(self) -> list[bytes]:
        kind = self._random.random()
        if kind < 0.2:
            return self._blocks(self._random.randint(16, 96))
        if kind < 0.55 or not self._open:
            system = self._systems[min(int(self._random.paretovariate(0.8)), SYSTEM_PROMPTS) - 1]
            talk = [*system, *self._blocks(self._random.randint(2, 16))]
        else:
            talk = self._open.pop(self._random.randrange(max(0, len(self._open) - 24), len(self._open)))
            talk = [*talk, *self._blocks(self._random.randint(4, 24))]
        self._open.append(talk)
        return talk


def hit_blocks(tier: HostTier, prompt: Sequence[bytes]) -> int:
    """The longest prefix, short of the whole prompt, that every group can resume from."""
    held = tier.held("r", [block_key(h, g) for h in prompt for g in (*WINDOWS, FULL)])
    full = 0
    while full < len(prompt) - 1 and block_key(prompt[full], FULL) in held:
        full += 1
    for end in range(full, 0, -1):
        tail = prompt[max(0, end - WINDOW_BLOCKS) : end]
        if all(block_key(h, g) in held for h in tail for g in WINDOWS):
            return end
    return 0


def serve(tier: HostTier, prompt: Sequence[bytes]) -> int:
    """Blocks loaded for a prompt; what the request then has in the GPU is stored."""
    hit = hit_blocks(tier, prompt)
    first_window = max(0, hit - WINDOW_BLOCKS)
    loaded = [block_key(h, FULL) for h in prompt[:hit]]
    loaded += [block_key(h, g) for h in prompt[first_window:hit] for g in WINDOWS]
    if tier.begin_load(loaded) is None:
        raise RuntimeError("a hit could not be loaded")
    for key in loaded:
        tier.end_load(key, ok=True)
    chain = [
        block_key(h, g)
        for i, h in enumerate(prompt)
        for g in ((*WINDOWS, FULL) if i >= first_window else (FULL,))
    ]
    for key, _ in tier.begin_store(chain, prompt):
        tier.end_store(key, ok=True)
    tier.take_changes()
    return hit


def simulate(policy: str, slots: int, seed: int, requests: int = REQUESTS) -> Outcome:
    """All requests against a tier of this many slots."""
    made = make_policy(policy, slots=slots, shapes=SHAPES, hash_block_tokens=BLOCK, boundary_tokens=BLOCK)
    tier = HostTier(slots, made)
    traffic = Traffic(seed)
    prompt_tokens = hit_tokens = 0
    for _ in range(requests):
        prompt = traffic.next_prompt()
        prompt_tokens += len(prompt) * BLOCK
        hit_tokens += serve(tier, prompt) * BLOCK
    tier.check_integrity()
    return Outcome(prompt_tokens, hit_tokens)


def main() -> None:
    print("slots   " + "".join(f"{name:>10}" for name in POLICY_NAMES) + "   (share of prompt tokens loaded)")
    for slots in (2_000, 4_000, 8_000, 16_000, 32_000):
        shares = [simulate(name, slots, seed=1).share for name in POLICY_NAMES]
        print(f"{slots:<8}" + "".join(f"{share:>10.3f}" for share in shares))


if __name__ == "__main__":
    main()
