"""Random engines and random traffic: every mix of groups, hashes and pools that vLLM runs, named by a seed.

A mix is all of its name: ``random_mix("7_090")`` is the same engine and the same traffic on every machine.
What vLLM itself refuses (the block pool's layout knows) is drawn again. No vLLM in here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import Family
from kvatlas.publisher.pool.layout import PoolLayout, pool_layout
from kvatlas.router.index.learn.hash_scheme import SEEDS_MAX
from tests.publisher.pool.layouts import Layout, chunked, full, mamba, replayed, ring, window
from tests.publisher.pool.pool_load import VOCAB_TOKENS, PlacementRequest

Group = dict[str, Any]

BLOCK_SIZES = (16, 16, 16, 16, 8, 32, 32, 64, 48)
ADAPTERS = {"sql": "/adapters/sql", "poet": "/adapters/poet"}
SALTS = ("tenant-a", "tenant-b")
IMAGES = {"cat-image": 21, "dog-image": 46, "map-image": 5, "big-image": 90}
"""Identifier -> tokens: one image always takes as many."""

PROMPT_TOKENS_MAX = 300
OUTPUT_TOKENS_MAX = 24


@dataclass(frozen=True)
class Mix:
    """One engine and the traffic on it; the chances are per request. ``lookahead`` in tokens (vLLM 0.33)."""

    name: str
    layout: Layout
    lookahead: int = 0
    requests: int = 16
    extras: dict[str, float] = field(default_factory=dict)
    """Chance that a prompt has a "lora", a "salt" or "mm" items; 1.0: no request is without."""
    shortest: int = 1
    longest: int = PROMPT_TOKENS_MAX
    """Of a prompt; in some mixes hardly a block, so that most prompts are shorter than one."""
    first_token: int = 0
    """Added to token ids: large vocabularies, and beyond 16 bits."""
    arrival: float = 0.3
    probe: float = 0.4
    abort: float = 0.01
    reset: float = 0.01
    by_priority: bool = False
    """vLLM's ``--scheduling-policy priority``, requests with different priorities."""
    async_scheduling: bool = False
    drafts: int = 0
    """Drafted tokens per step, of which some are rejected."""
    reports: float = 0.0
    """Chance that a request has ``kv_cache_report_mode=full``."""
    resets_running: bool = False
    """Cache resets preempt the running requests (``reset_running_requests``)."""
    skips: float = 0.0
    """Chance that a request reads no cache, so that blocks are stored again."""
    embedded: float = 0.0
    """Chance that a request is given as embeddings."""

    @property
    def is_plain(self) -> bool:
        """Whether it is scheduled as our block pool's driver does: in order, output before the next step,
        a token per step."""
        ordered = not (self.by_priority or self.async_scheduling or self.resets_running)
        return ordered and not (self.drafts or self.reports or self.skips or self.embedded)


def random_mix(name: str, *, v033: bool = False) -> Mix:
    """The mix of this name; ``v033``: of what vLLM 0.33 runs (look-ahead hashes, no Mamba mode "all")."""
    rng = random.Random(f"mix/{name}/{v033}")
    while True:
        mix = _draw(rng, name, v033=v033)
        try:
            may_report = _may_report(_pool_layout(mix.layout), mix.layout)
        except ValueError:
            continue
        # ``mamba_block_size`` is one setting of vLLM's CacheConfig.
        if len({spec.block_size for spec in mix.layout.specs if spec.family is Family.MAMBA}) > 1:
            continue
        order = random.Random(f"order/{name}")
        mix = replace(
            mix,
            by_priority=order.random() < 0.2,
            async_scheduling=order.random() < 0.2,
            drafts=order.choice((1, 2, 3, 5)) if order.random() < 0.25 else 0,
            reports=order.choice((0.1, 0.5, 1.0)) if order.random() < 0.1 and may_report else 0.0,
            resets_running=order.random() < 0.1,
        )
        return replace(
            mix,
            # What is stored again without having been read looks like a report.
            skips=order.choice((0.1, 0.5)) if order.random() < 0.15 and not mix.reports else 0.0,
            embedded=order.choice((0.1, 0.5)) if order.random() < 0.1 else 0.0,
        )


def _draw(rng: random.Random, name: str, *, v033: bool) -> Mix:
    groups = _groups(rng, v033=v033)
    dcp = _ranks(rng, groups)
    if not any(group["kind"] == "chunked_local_attention" for group in groups) or rng.random() < 0.3:
        groups = _with_eagle(rng, groups)
    if dcp == 1 and rng.random() < 0.15:
        groups = _with_hidden(rng, groups)
    lcm = math.lcm(*(group["block_size"] for group in groups)) * dcp
    sparse = any(group["kind"] in {"sliding_window", "mamba"} for group in groups)
    algo = rng.choice(("sha256", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"))
    seeded = algo.startswith("xxhash") or rng.random() < 0.35
    layout = Layout(
        groups=groups,
        num_blocks=_pool_blocks(rng, groups),
        prefix_match_unit=_match_unit(rng, groups) if dcp == 1 else None,
        retention_interval=rng.choice((0, 0, None, lcm, 2 * lcm, 4 * lcm)) if sparse else 0,
        hash_algo=algo,
        seed=str(rng.choice((0, 1, 42, 1234, rng.randrange(1 << 11) % SEEDS_MAX))) if seeded else None,
        int_hashes=rng.random() < 0.6,
        max_num_batched_tokens=rng.choice((48, 64, 96, 96, 200, 512)),
        max_num_seqs=rng.choice((2, 4, 8, 8)),
        dcp=dcp,
    )
    return Mix(
        name,
        layout,
        lookahead=_lookahead(rng, groups) if v033 else 0,
        extras=_extras(rng),
        shortest=rng.choice((1, 1, 1, 1, 64, 150)),
        arrival=rng.choice((0.1, 0.3, 0.6)),
        reset=rng.choice((0.0, 0.0, 0.02)),
        longest=rng.choice((PROMPT_TOKENS_MAX,) * 11 + (min(group["block_size"] for group in groups) + 8,)),
        first_token=rng.choice((0, 0, 0, 65_500, 262_000, (1 << 31) - VOCAB_TOKENS)),
    )


def _lookahead(rng: random.Random, groups: tuple[Group, ...]) -> int:
    """Beyond 1 vLLM 0.33's finders run off the end of the hashes, but for full attention."""
    full_only = all(group["kind"] == "full_attention" for group in groups)
    return rng.choice((0, 0, 1, 1, 2, 3) if full_only else (0, 1))


def _groups(rng: random.Random, *, v033: bool) -> tuple[Group, ...]:
    """One to six groups; mostly full attention and something beside it, of one block size or several."""
    size = rng.choice(BLOCK_SIZES)
    sizes = (size,) if rng.random() < 0.6 else (size, size * 2, rng.choice(BLOCK_SIZES))
    mode = "align" if v033 or rng.random() < 0.7 else "all"
    kinds = rng.choice(("f", "f", "fw", "fw", "fww", "fwm", "fm", "fm", "fc", "fcc", "fcw", "fcm", "fcwm"))
    if rng.random() < 0.25:
        kinds = kinds[1:] or rng.choice("wcm")
    found: list[Group] = []
    for kind in kinds:
        template = _group(rng, kind, rng.choice(sizes), mode)
        found += [template] * rng.choice((1, 1, 1, 2, 3))
        if rng.random() < 0.15:
            found.append(_group(rng, kind, rng.choice(sizes), mode))
    rng.shuffle(found)
    return tuple(dict(group) for group in found[:6])


def _group(rng: random.Random, kind: str, size: int, mode: str) -> Group:
    match kind:
        case "f":
            return full(size)
        case "w":
            return window(rng.choice((1, 2, size, 33, 48, 64, 65, 100, 128, 160, 257)), size)
        case "c":
            return chunked(size * rng.choice((1, 2, 3, 4, 6, 8, 16)), size)
        case _:
            return mamba(mode, size)


def _with_eagle(rng: random.Random, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    if rng.random() < 0.75:
        return groups
    able = [i for i, group in enumerate(groups) if group["kind"] != "chunked_local_attention"]
    flagged = set(rng.sample(able, rng.randint(1, len(able)))) if able else set()
    # The drafter's layers may have other heads than the model's: vLLM splits the class, no event shows it.
    attention = any(groups[i]["kind"] != "mamba" for i in flagged)
    mark = {"is_eagle": True} | ({"apart": True} if attention and rng.random() < 0.25 else {})
    return tuple(
        group | ({"is_eagle": True} if group["kind"] == "mamba" else mark) if i in flagged else group
        for i, group in enumerate(groups)
    )


def _with_hidden(rng: random.Random, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Groups without prefix cache beside the others: ring buffers, and windows rebuilt by replay."""
    size, found = min(group["block_size"] for group in groups), list(groups)
    hidden = [ring(size), ring(size), replayed(rng.choice((size, 48, 64, 128)), size)]
    for group in rng.sample(hidden, rng.randint(1, 2)):
        found.insert(rng.randint(0, len(found)), group)
    return tuple(found)


def _ranks(rng: random.Random, groups: tuple[Group, ...]) -> int:
    """Ranks of decode context parallelism; only full attention and Mamba groups run with it."""
    kinds = {group["kind"] for group in groups}
    return rng.choice((2, 2, 4)) if kinds <= {"full_attention", "mamba"} and rng.random() < 0.3 else 1


def _match_unit(rng: random.Random, groups: tuple[Group, ...]) -> int | None:
    """Sometimes hashes finer than the groups' blocks."""
    gcd = math.gcd(*(group["block_size"] for group in groups))
    modes = {group.get("mamba_cache_mode") for group in groups}
    if len(groups) == 1 or "all" in modes or rng.random() < 0.7:
        return None
    return rng.choice([unit for unit in (4, 8, 16, 32) if gcd % unit == 0] or [gcd])


def _pool_blocks(rng: random.Random, groups: tuple[Group, ...]) -> int:
    """From hardly more than one request needs to more than is ever used."""
    longest = PROMPT_TOKENS_MAX + OUTPUT_TOKENS_MAX
    one = sum(longest // group["block_size"] + 3 for group in groups) + 12
    return int(one * rng.choice((1.1, 1.3, 1.6, 2.0, 3.0, 6.0)))


def _extras(rng: random.Random) -> dict[str, float]:
    """Mostly nothing but tokens; else some, or all requests, with something that enters their hashes."""
    if rng.random() < 0.4:
        return {}
    return {kind: rng.choice((0.2, 0.5, 1.0)) for kind in ("lora", "salt", "mm") if rng.random() < 0.4}


def _pool_layout(layout: Layout) -> PoolLayout:
    scheme = HashScheme(hash_block_size=layout.hash_block_size)
    return pool_layout(layout.specs, scheme, layout.retention_interval, layout.dcp)


def _may_report(pool: PoolLayout, layout: Layout) -> bool:
    """Whether vLLM survives ``kv_cache_report_mode=full``: it fails (IndexError) with a hit inside a block
    that the prompt does not fill, and (AssertionError) under decode context parallelism. Where all groups are
    chunked, nothing shows the layout ("Known holes", docs/exactness.md)."""
    return (
        layout.dcp == 1
        and not pool.partial_hits
        and any(c.family is not Family.CHUNKED for c in pool.classes)
    )


class Prompts:
    """Prompts of one mix: fresh ones, branches and continuations of earlier ones and of answers, repeats."""

    def __init__(self, mix: Mix, rng: random.Random) -> None:
        self._mix = mix
        self._rng = rng
        self._sizes = [spec.block_size for spec in mix.layout.specs]
        self._roots = [self._tokens(rng.randint(40, 200)) for _ in range(3)]
        self.history: list[PlacementRequest] = []

    def ask(self, *, asked: bool = True) -> PlacementRequest:
        """The next prompt; ``asked``: it will be a request, so later ones may go on from it."""
        rng = self._rng
        if not self.history or rng.random() < 0.2:
            fresh = self._fresh()
        else:
            base = rng.choice(self.history[-12:] if rng.random() < 0.7 else self.history)
            fresh = self._related(base)
        if asked:
            self.history.append(fresh)
        return fresh

    def _related(self, base: PlacementRequest) -> PlacementRequest:
        rng, tokens = self._rng, list(base.token_ids)
        kind = rng.random()
        if kind < 0.5:
            tokens = tokens[: self._cut(len(tokens))]
        if kind > 0.25:
            tokens += self._tokens(rng.randint(1, 80))
        if kind > 0.92:
            tokens[rng.randrange(len(tokens))] = self._tokens(1)[0]
        return _with_tokens(base, self._long_enough(tokens))

    def _cut(self, length: int) -> int:
        """Anywhere, or at and beside a block's end."""
        rng, size = self._rng, self._rng.choice(self._sizes)
        if rng.random() < 0.5 and length > size:
            return max(1, min(length, rng.randint(1, length // size) * size + rng.choice((-1, 0, 1))))
        return rng.randint(1, length)

    def _fresh(self) -> PlacementRequest:
        rng = self._rng
        root = rng.choice(self._roots) if rng.random() < 0.6 else []
        tokens = root[: rng.randint(0, len(root))] + self._tokens(rng.randint(1, 160))
        chances = self._mix.extras
        lora = rng.choice(sorted(ADAPTERS)) if rng.random() < chances.get("lora", 0) else None
        salt = rng.choice(SALTS) if rng.random() < chances.get("salt", 0) else None
        tokens = self._long_enough(tokens)
        items = self._items(len(tokens)) if rng.random() < chances.get("mm", 0) else ()
        return PlacementRequest(tokens, lora, ADAPTERS[lora] if lora else None, salt, items)

    def _items(self, length: int) -> tuple[tuple[str, int, int], ...]:
        rng, items = self._rng, list[tuple[str, int, int]]()
        offset = rng.randint(0, 30)
        while offset < length - 2 and len(items) < 5:
            name = rng.choice(sorted(IMAGES))
            items.append((name, offset, IMAGES[name]))
            offset += IMAGES[name] + rng.choice((0, 0, rng.randint(0, 40)))
        return tuple(item for item in items if item[1] + item[2] < length)

    def _long_enough(self, tokens: list[int]) -> list[int]:
        missing = self._mix.shortest - len(tokens)
        return (tokens + self._tokens(max(missing, 0)))[: self._mix.longest]

    def _tokens(self, count: int) -> list[int]:
        first = self._mix.first_token
        return [first + self._rng.randrange(3, VOCAB_TOKENS) for _ in range(count)]


def _with_tokens(ask: PlacementRequest, tokens: list[int]) -> PlacementRequest:
    """``ask`` with other tokens and the items that still fit."""
    items = tuple(item for item in ask.mm if item[1] + item[2] < len(tokens))
    return PlacementRequest(tokens, ask.lora_name, ask.lora_path, ask.cache_salt, items)
