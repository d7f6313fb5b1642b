"""Prompts in flight: common prefixes, what they leave behind, grace, bounds; held against a plain list."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme, block_hashes
from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.index.learn.layout import ModelFacts, make_layout
from kvatlas.router.placement import inflight as inflight_module
from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.inflight import (
    Common,
    InflightPrefixes,
    InflightPrompt,
    InflightSettings,
    Kept,
    KeptRule,
    kept_prefixes,
    kept_ranges,
    kept_rule,
)
from tests.support.examples import examples

SCHEME = HashScheme(algo="sha256_cbor", hash_block_size=1)


def ends(*each: int) -> Kept:
    return tuple(range(end, end + 1) for end in each)


def hashes(text: str) -> list[BlockHash]:
    """One hash block per letter."""
    return block_hashes([ord(letter) for letter in text], SCHEME)


def test_coming_tokens_end_before_the_last_token_of_the_prompt() -> None:
    """A prompt of exactly k blocks behind a longer one that keeps 1 and k of them can hit 1."""
    inflight = InflightPrefixes()
    inflight.add("a", hashes("abcdef"), 0.0, keeps=ends(1, 3, 6))
    assert inflight.common(hashes("abc"), 0.0, coming_max=2) == Common({"a": 3}, {"a": 1})
    assert inflight.common(hashes("abc"), 0.0, coming_max=3) == Common({"a": 3}, {"a": 3})
    assert inflight.common(hashes("abc"), 0.0, coming_max=0) == Common({"a": 3}, {})


def test_common_prefix_per_engine() -> None:
    inflight = InflightPrefixes()
    inflight.add("a", hashes("system prompt one"), 0.0)
    inflight.add("b", hashes("system of b"), 0.0)
    inflight.add("c", hashes("other"), 0.0)
    assert inflight.common(hashes("system prompt two"), 0.0).blocks == {"a": 14, "b": 7}
    assert inflight.common(hashes("oth"), 0.0).blocks == {"c": 3}
    assert inflight.common([], 0.0).blocks == {}
    assert inflight.common(hashes("nobody"), 0.0).blocks == {}
    assert inflight.check_integrity() == []


def test_an_ended_prompt_counts_until_its_grace_is_over() -> None:
    inflight = InflightPrefixes(InflightSettings(grace_s=2.0))
    prompt = inflight.add("a", hashes("abc"), 0.0, ends(3))
    assert inflight.common(hashes("abcd"), 0.0) == Common({"a": 3}, {"a": 3})
    inflight.end(prompt, 10.0)
    assert inflight.common(hashes("abcd"), 11.9) == Common({"a": 3}, {})  # evictions are the events' to tell
    assert inflight.common(hashes("abcd"), 12.0).blocks == {}
    assert inflight.stats.prompts == inflight.stats.blocks == 0


def test_ended_prompts_are_dropped_without_a_query() -> None:
    inflight = InflightPrefixes(InflightSettings(grace_s=2.0))
    inflight.end(inflight.add("a", hashes("abc"), 0.0), 10.0)
    inflight.expire(11.9)
    assert inflight.stats.prompts == 1
    inflight.expire(12.0)
    assert inflight.stats.prompts == inflight.stats.blocks == 0


def test_a_failed_prompt_leaves_immediately_and_only_once() -> None:
    inflight = InflightPrefixes()
    first, twin = inflight.add("a", hashes("abc"), 0.0), inflight.add("a", hashes("abc"), 0.0)
    inflight.drop(first)
    inflight.drop(first)
    inflight.end(first, 0.0)
    assert inflight.common(hashes("abc"), 0.0).blocks == {"a": 3}
    inflight.drop(twin)
    assert inflight.common(hashes("abc"), 0.0).blocks == {}
    assert inflight.check_integrity() == []


def test_kept_blocks_count_only_for_prompts_that_contain_them() -> None:
    inflight = InflightPrefixes()
    prompt = inflight.add("a", hashes("system user"), 0.0, ends(6, 10))
    assert inflight.common(hashes("system user goes on"), 0.0).coming == {"a": 10}
    assert inflight.common(hashes("system us"), 0.0).coming == {"a": 6}
    assert inflight.common(hashes("syst"), 0.0).coming == {}
    inflight.prefilled(prompt, 0.0)
    assert inflight.common(hashes("system user"), 0.0) == Common({"a": 11}, {})
    inflight.add("b", hashes("siamese"), 0.0)
    inflight.add("b", hashes("sisters"), 0.0, (range(2, 8, 2),))
    assert inflight.common(hashes("sit"), 0.0).coming == {"b": 2}
    assert inflight.check_integrity() == []


def test_blocks_of_a_computed_prompt_count_until_its_batch_is_applied() -> None:
    stored: set[BlockHash] = set()
    inflight = InflightPrefixes(InflightSettings(grace_s=2.0))
    inflight.is_stored = lambda engine_id, block: block in stored
    first = inflight.add("a", hashes("system user"), 0.0, ends(6, 10))
    inflight.prefilled(first, 0.0)
    inflight.end(first, 0.1)
    inflight.applied("a")  # of an earlier step
    inflight.applied("b")
    assert inflight.common(hashes("system user"), 0.2) == Common({"a": 11}, {"a": 10})
    assert inflight.check_integrity() == []
    stored.add(hashes("system user")[9])
    inflight.applied("a")
    assert inflight.common(hashes("system user"), 0.2) == Common({"a": 11}, {})

    second = inflight.add("a", hashes("system other"), 1.0, ends(12))
    inflight.prefilled(second, 1.0)
    assert inflight.common(hashes("system other"), 2.9).coming == {"a": 12}
    assert inflight.common(hashes("system other"), 3.0) == Common({"a": 12}, {}), "no batch came"
    inflight.drop(second)
    assert inflight.check_integrity() == []


def test_a_branch_that_goes_leaves_shorter_prompts_as_they_were() -> None:
    inflight = InflightPrefixes()
    inflight.add("short", hashes("ab"), 0.0)
    inflight.add("long", hashes("abcd"), 0.0)
    branch = inflight.add("branch", hashes("abx"), 0.0)
    inflight.drop(branch)
    assert inflight.common(hashes("abcd"), 0.0).blocks == {"short": 2, "long": 4}


def test_forgetting_an_engine_leaves_the_others() -> None:
    inflight = InflightPrefixes()
    inflight.add("a", hashes("abcd"), 0.0, ends(2))
    inflight.add("b", hashes("abxy"), 0.0, ends(2))
    inflight.forget("a")
    assert inflight.common(hashes("abcd"), 0.0) == Common({"b": 2}, {"b": 2})
    assert inflight.check_integrity() == []


def test_memory_is_bounded_by_prompts_and_by_blocks() -> None:
    inflight = InflightPrefixes(InflightSettings(prompts_max=3, blocks_max=10))
    for letter in "abcd":
        inflight.add("e", hashes(letter * 2), 0.0)
    assert (inflight.stats.prompts, inflight.stats.evicted) == (3, 1)
    assert inflight.common(hashes("aa"), 0.0).blocks == {}  # the oldest left
    inflight.add("e", hashes("x" * 9), 0.0)
    assert inflight.stats.blocks <= 10
    assert inflight.common(hashes("xxx"), 0.0).blocks == {"e": 3}
    assert inflight.check_integrity() == []


def test_a_list_that_grows_after_it_was_added_does_no_harm() -> None:
    inflight = InflightPrefixes()
    growing = hashes("abc")
    prompt = inflight.add("a", growing, 0.0, ends(3))
    growing += hashes("abcdef")[3:]
    assert inflight.common(hashes("abcdef"), 0.0).blocks == {"a": 3}
    inflight.drop(prompt)
    assert inflight.common(hashes("abcdef"), 0.0).blocks == {}


def kept(
    rule: KeptRule, tokens: int, shared: int = 0, held: int = 0, interval: int | None = 0
) -> tuple[int, ...]:
    found = kept_prefixes(rule, tokens, Hit(held, shared_prefix_tokens=shared), interval)
    assert list(found) == sorted(found, key=lambda span: span[-1])
    ends = sorted(end for span in found for end in span)
    assert len(ends) == len(set(ends)), found
    return tuple(ends)


def plainly_kept(
    rule: KeptRule, tokens: int, shared: int, held: int, interval: int | None
) -> tuple[int, ...]:
    """The same, end by end."""
    step, drop, states = rule.alignment, rule.dropped_tokens, rule.state_tokens
    held = 0 if rule.all_full else held
    if rule.every_block:
        ends = set(range(step, tokens - rule.unproven_tokens + 1, step))
        return tuple(end // rule.hash_block_size for end in sorted(ends) if end > held)
    again = (tokens - 1) // step * step
    whole = tokens // step * step if drop else again
    wide = max(states, step)
    junction = shared // wide * wide + drop if shared < tokens - 1 else whole
    ends = {min(junction, whole), whole}
    if not states:
        retained = step if interval is None else interval
        ends |= {again, *(range(retained + drop, tokens + 1, retained) if retained else ())}
    elif states > step and not drop:
        ends.add((tokens - 1) // states * states)
    base = held
    for end in sorted(ends) if rule.window_tokens else ():
        if end - rule.window_tokens <= base < end:
            ends.update(range((base // step + 1) * step, end, step))
        base = max(base, end)
    return tuple(end // rule.hash_block_size for end in sorted(ends) if end - drop > held)


@st.composite
def rules(draw: st.DrawFn) -> KeptRule:
    """Of every kind of layout, in small blocks."""
    unit = draw(st.sampled_from((1, 2)))
    step = unit * draw(st.integers(1, 3))
    kind = draw(st.sampled_from(("full", "chunks", "windows", "states", "eagle", "eagle states")))
    if kind in {"full", "chunks"}:
        return KeptRule(
            step, unit, every_block=True, all_full=kind == "full", unproven_tokens=draw(st.integers(0, 1))
        )
    return KeptRule(
        step,
        unit,
        state_tokens=step * draw(st.integers(1, 3)) if "states" in kind else 0,
        window_tokens=unit * draw(st.integers(0, 20)) if kind == "windows" else 0,
        dropped_tokens=step if "eagle" in kind else 0,
    )


@settings(max_examples=examples(2000))
@given(
    rules(),
    st.integers(0, 80),
    st.integers(0, 90),
    st.integers(0, 80),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_ranges_of_kept_ends_are_the_ends_one_by_one(
    rule: KeptRule, tokens: int, shared: int, held: int, retained: int | None
) -> None:
    interval = None if retained is None else retained * rule.alignment
    assert kept(rule, tokens, shared, held, interval) == plainly_kept(rule, tokens, shared, held, interval)


EVERY_RULE = [
    KeptRule(16, 16, every_block=True, all_full=True),
    KeptRule(16, 16, every_block=True),
    KeptRule(16, 16, window_tokens=1024),
    KeptRule(32, 16, state_tokens=256),
    KeptRule(16, 16, dropped_tokens=16),
]
INTERVALS = [None, 0, 16, 512, 4096]


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_long_prompt_costs_no_more_steps_than_a_short_one_and_no_memory(
    rule: KeptRule, interval: int | None
) -> None:
    """Its hashes are 8 bytes a block, and the only thing of its length; a next turn is added beside it."""
    short, (long, most) = (steps_and_bytes(rule, tokens, interval) for tokens in (1 << 12, 1 << 18))
    assert long <= 1.5 * short[0]
    assert most < 16_000


def steps_and_bytes(rule: KeptRule, tokens: int, interval: int | None) -> tuple[int, int]:
    """Lines of the module that run for a prompt and its next turn, and the most memory they take."""
    one = array("Q", range(1, tokens // 16 + 1))
    following = one + array("Q", range(1 << 40, (1 << 40) + 20))
    inflight, steps = InflightPrefixes(), 0

    def line(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal steps
        steps += event == "line" and frame.f_code.co_filename == inflight_module.__file__
        return line

    before = sys.gettrace()  # coverage's, in `make power`
    tracemalloc.start()
    sys.settrace(line)
    try:
        kept = kept_prefixes(rule, tokens, Hit(1000, shared_prefix_tokens=3000), interval)
        first = inflight.add("e", one, 0.0, kept)  # type: ignore[arg-type]
        assert inflight.common(following, 0.0, tokens // 16).blocks == {"e": tokens // 16}  # type: ignore[arg-type]
        kept = kept_prefixes(rule, tokens + 320, Hit(1000, shared_prefix_tokens=tokens), interval)
        second = inflight.add("e", following, 0.0, kept)  # type: ignore[arg-type]
        for prompt in (first, second):
            inflight.prefilled(prompt, 0.0)
            inflight.drop(prompt)
    finally:
        sys.settrace(before)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return steps, most


def test_an_interval_that_vllm_refuses_is_the_next_longer_one() -> None:
    assert kept(KeptRule(32, 16), 163, interval=50) == kept(KeptRule(32, 16), 163, interval=64)


def test_keeps_follows_the_retention_rule() -> None:
    rule, every = KeptRule(32, 16), KeptRule(32, 16, every_block=True)
    assert kept(rule, 163) == (10,)  # the last boundary of the prompt
    # never the whole prompt; the junction of a shared prefix of 100
    assert kept(rule, 160, 100) == (6, 8)
    assert kept(rule, 163, interval=64) == (4, 8, 10)
    assert kept(rule, 163, interval=None) == (2, 4, 6, 8, 10)
    assert kept(every, 163) == (2, 4, 6, 8, 10)
    assert kept(every, 160) == (2, 4, 6, 8, 10)  # stored whole
    assert kept(KeptRule(32, 16, every_block=True, unproven_tokens=1), 160) == (2, 4, 6, 8)
    assert kept(rule, 16, 500) == ()


def test_a_prompt_leaves_no_windows_or_states_within_its_own_hit() -> None:
    """It computes nothing there, so vLLM stores nothing there; but it holds full attention to its end."""
    rule = KeptRule(32, 16)
    assert kept(rule, 163, held=96) == (10,)
    assert kept(rule, 163, 100, held=96) == (10,)
    assert kept(rule, 163, 130, held=96) == (8, 10)
    assert kept(rule, 100, held=96) == ()
    assert kept(rule, 163, held=96, interval=32) == (8, 10)
    assert kept(rule, 163, held=96, interval=None) == (8, 10)
    assert kept(KeptRule(32, 16, every_block=True), 163, held=96) == (8, 10)
    assert kept(KeptRule(32, 16, every_block=True, all_full=True), 163, held=96) == (2, 4, 6, 8, 10)


def test_windows_that_meet_are_hits_at_every_boundary_between() -> None:
    """Windows of 112 tokens: of a prompt as short all blocks stay, of a longer one those at its end."""
    rule = KeptRule(16, 16, window_tokens=112)
    assert kept(rule, 112) == (1, 2, 3, 4, 5, 6)
    assert kept(rule, 129) == (8,)
    assert kept(rule, 163, held=48) == (4, 5, 6, 7, 8, 9, 10)  # its own window begins at its hit
    assert kept(rule, 163, held=32) == (10,)
    assert kept(rule, 163, 70) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)  # from the junction at 64 on


def test_states_are_left_only_where_chunks_end() -> None:
    """The junction is stored at the last whole block of a state, and the last whole block too."""
    rule = KeptRule(16, 16, state_tokens=64)
    assert kept(rule, 163, interval=None) == (8, 10)
    assert kept(rule, 163, 100, interval=64) == (4, 8, 10)
    assert kept(rule, 163, 100, held=64) == (8, 10)
    assert kept(rule, 50) == (3,)


def test_a_lookup_drops_only_behind_the_junction_and_the_last_boundary() -> None:
    rule = KeptRule(32, 16, dropped_tokens=32)
    assert kept(rule, 163, 70) == (6, 10)
    assert kept(rule, 160) == (8, 10)  # for the same prompt again, and for a longer one
    assert kept(rule, 163, 70, held=64) == (10,)


def test_the_rule_of_a_layout() -> None:
    full, wide = GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=128)
    narrow = GroupSpec(2, "sliding_window", 16, sliding_window=33)
    states = GroupSpec(1, "mamba", 64, mamba_cache_mode="align")

    def rule(*groups: GroupSpec) -> KeptRule:
        return kept_rule(make_layout(groups, ModelFacts(), 16))

    assert rule(full) == KeptRule(16, 16, every_block=True, all_full=True)
    assert rule(full, wide, narrow) == KeptRule(16, 16, window_tokens=32)
    marked = msgspec.structs.replace(narrow, is_eagle=True)
    assert rule(full, wide, marked) == KeptRule(16, 16, dropped_tokens=16)
    assert rule(full, states) == KeptRule(16, 16, state_tokens=64, splits=True)
    alike = msgspec.structs.replace(states, block_size=16)
    assert rule(full, alike) == KeptRule(16, 16, state_tokens=16)


def test_a_prompt_that_is_computed_before_the_one_it_relies_on() -> None:
    """Lower ranks are computed first where the engine orders them; none passes one that is computed."""
    inflight, hit = InflightPrefixes(), Hit(2, coming_tokens=6)

    def passed(rank: float, text: str = "system prompt", hit: Hit = hit) -> float | None:
        return inflight.passed("a", hashes(text), hit, 1, rank)

    ahead = inflight.add("a", hashes("system user"), 0.0, ends(6, 10))
    assert passed(0.0) is None
    assert passed(-1.0) == 0.0
    assert passed(-1.0, hit=Hit(6, coming_tokens=6)) is None  # it has these blocks already
    assert passed(-1.0, text="sister prompt") is None
    inflight.drop(ahead)
    last = inflight.add("a", hashes("system user"), 0.0, ends(6, 10), rank=5.0)
    first = inflight.add("a", hashes("system"), 0.0, ends(6), rank=3.0)
    inflight.add("a", hashes("system"), 0.0, ends(3), rank=1.0)
    inflight.add("b", hashes("system"), 0.0, ends(6), rank=1.0)
    assert [passed(rank) for rank in (2.0, 3.0, 4.0, 6.0)] == [3.0, None, None, None]
    inflight.drop(first)
    assert passed(4.0) == 5.0
    inflight.is_stored = lambda engine_id, block: False
    inflight.prefilled(last, 0.0)
    assert passed(4.0) is None


operations = st.lists(
    st.tuples(
        st.sampled_from(("add", "prefilled", "end", "drop", "applied")),
        st.sampled_from("ABC"),
        st.text("ab", max_size=8),
        st.lists(st.builds(range, st.integers(1, 9), st.integers(2, 12), st.integers(1, 3)), max_size=3),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=examples(150))
@given(operations=operations, probes=st.lists(st.text("ab", max_size=8), max_size=5))
def test_agrees_with_comparing_every_prompt(
    operations: list[tuple[str, str, str, list[range], int]], probes: list[str]
) -> None:
    inflight = InflightPrefixes(InflightSettings(grace_s=5.0))
    stored: set[tuple[str, BlockHash]] = set()
    inflight.is_stored = lambda engine_id, block: (engine_id, block) in stored
    model: list[_Known] = []
    for now, (what, engine, text, kept, which) in enumerate(operations):
        if what == "add":
            prompt = inflight.add(engine, hashes(text), now, kept_ranges(kept))
            model.append(_Known(prompt, text, {end for span in kept for end in span if end <= len(text)}))
        elif what == "applied":
            stored |= {(engine, block) for block in hashes(text)}
            inflight.applied(engine)
            for known in [known for known in model if known.prompt.engine_id == engine]:
                known.settle(stored)
        elif model:
            _happen(inflight, model[which % len(model)], what, now, stored)
        model = [known for known in model if known.until > now]
        for known in [known for known in model if known.coming_until <= now]:
            known.kept = set()
        for probe in [text, *probes]:
            assert inflight.common(hashes(probe), now) == _common(model, probe)
        assert inflight.check_integrity() == []


@dataclass
class _Known:
    prompt: InflightPrompt
    text: str
    kept: set[int]
    until: float = float("inf")
    coming_until: float = float("inf")

    def compute(self, stored: set[tuple[str, BlockHash]], now: float) -> None:
        """Its first token arrived, or the whole answer."""
        if self.coming_until == float("inf"):
            self.coming_until = now + 5.0
            self.settle(stored)

    def settle(self, stored: set[tuple[str, BlockHash]]) -> None:
        """Its engine stored blocks."""
        if self.kept and self.coming_until < float("inf"):
            last = hashes(self.text)[max(self.kept) - 1]
            self.kept = set() if (self.prompt.engine_id, last) in stored else self.kept


def _happen(
    inflight: InflightPrefixes, known: _Known, what: str, now: float, stored: set[tuple[str, BlockHash]]
) -> None:
    if what == "drop":
        inflight.drop(known.prompt)
        known.until = -1.0
    elif what == "prefilled":
        inflight.prefilled(known.prompt, now)
        known.compute(stored, now)
    elif known.until == float("inf"):
        inflight.end(known.prompt, now)
        known.compute(stored, now)
        known.until = now + 5.0


def _common(model: list[_Known], probe: str) -> Common:
    blocks: dict[str, int] = {}
    coming: dict[str, int] = {}
    for known in model:
        engine_id, same = known.prompt.engine_id, 0
        while probe[same : same + 1] == known.text[same : same + 1] != "":
            same += 1
        if same:
            blocks[engine_id] = max(same, blocks.get(engine_id, 0))
        for end in known.kept:
            if end <= same:
                coming[engine_id] = max(end, coming.get(engine_id, 0))
    return Common(blocks, coming)
