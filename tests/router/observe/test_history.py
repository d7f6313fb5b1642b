"""The last five minutes: what counters grew by, interval by interval, of one process and of several."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.observe import group_prefixes
from kvatlas.router.observe.group_prefixes import GROUPS_MAX, STEP_TOKENS, GroupPrefixes
from kvatlas.router.observe.history import EVERY_S, INTERVALS_MAX, Counts, Gauges, HistoryLog, RecentHistory

GAUGES = Gauges(active=2, engines=3, engines_up=1)
FIELDS = Counts.__struct_fields__


def requests(history: RecentHistory) -> list[int]:
    return [interval.requests for interval in history.intervals]


@given(st.lists(st.tuples(st.floats(0.01, 12.0), st.integers(0, 50)), max_size=40))
def test_every_request_is_in_exactly_one_interval(steps: list[tuple[float, int]]) -> None:
    """However late the samples come."""
    now, total, log = 1002.5, 0, HistoryLog(1002.5)
    for wait_s, count in steps:
        now, total = now + wait_s, total + count
        due_s = log.add(now, {"a": Counts(requests=total)}, GAUGES)
        assert 0 < due_s <= EVERY_S
    shown = log.recent_history(now, {"a": Counts(requests=total)}, GAUGES, unix_s=5e8)
    slots = [interval.slot for interval in shown.intervals]
    assert slots == sorted(set(slots))
    assert slots[-1] == now // EVERY_S or not steps or shown.intervals[-1].seconds < EVERY_S
    if now - 1002.5 < INTERVALS_MAX * EVERY_S:
        assert sum(requests(shown)) == total
        assert abs(sum(interval.seconds for interval in shown.intervals) - (now - 1002.5)) < 1e-6


def test_it_shows_five_minutes_and_no_more() -> None:
    log, now = HistoryLog(0.0), 0.0
    for number in range(1, 200):
        now = number * EVERY_S + 0.001
        log.add(now, {"a": Counts(requests=number)}, GAUGES)
    shown = log.recent_history(now + 1, {"a": Counts(requests=199)}, GAUGES, unix_s=1.0)
    assert requests(shown) == [1] * INTERVALS_MAX + [0]
    assert (shown.intervals[-1].engines, shown.intervals[-1].engines_up) == (3, 1)
    # A process that stood still for long shows nothing of before.
    assert requests(log.recent_history(now + 3600, {"a": Counts(requests=199)}, GAUGES, unix_s=1.0)) == [0]


def test_an_engine_that_leaves_takes_nothing_back_and_counts_from_zero_when_it_returns() -> None:
    log = HistoryLog(0.0)
    log.add(5.1, {"a": Counts(requests=10), "b": Counts(requests=7)}, GAUGES)
    log.add(10.1, {"b": Counts(requests=9)}, GAUGES)
    log.add(15.1, {"a": Counts(requests=4), "b": Counts(requests=9)}, GAUGES)
    log.add(20.1, {"a": Counts(requests=3), "b": Counts(requests=9)}, GAUGES)  # left and came back within 5 s
    shown = log.recent_history(20.2, {"a": Counts(requests=3), "b": Counts(requests=9)}, GAUGES, unix_s=1.0)
    assert requests(shown) == [17, 2, 4, 3, 0]


counts = st.builds(Counts, **{name: st.integers(0, 100) for name in FIELDS})


@given(st.lists(st.tuples(st.integers(0, 3), counts), max_size=12), st.integers(0, 3))
def test_several_workers_add_up_interval_by_interval(parts: list[tuple[int, Counts]], first: int) -> None:
    """Whichever answers for all, and since whenever each runs."""
    shown = []
    for worker in range(4):
        log, total = HistoryLog(5.0 * worker), dict.fromkeys(FIELDS, 0)
        for number, (owner, part) in enumerate(parts, worker + 1):
            if owner == worker:
                total = {name: total[name] + getattr(part, name) for name in FIELDS}
            log.add(5.0 * number + 0.01, {"e": Counts(**total)}, GAUGES)
        now = 5.0 * (worker + len(parts)) + 0.02
        shown.append(log.recent_history(now, {"e": Counts(**total)}, GAUGES, unix_s=float(worker)))
    whole = shown[first].joined(shown[:first] + shown[first + 1 :])
    assert whole.at_s == float(first)
    slots = [interval.slot for interval in whole.intervals]
    assert slots == sorted(set(slots))
    for name in FIELDS:
        expected = sum(getattr(part, name) for _, part in parts)
        assert sum(getattr(interval, name) for interval in whole.intervals) == expected
    assert all(interval.engines_up == 1 and interval.engines == 3 for interval in whole.intervals)


PROMPT = st.lists(st.integers(0, 1), max_size=9).map(
    lambda parts: array("i", [part for part in parts for _ in range(STEP_TOKENS // 2)])
)


@given(st.lists(st.tuples(st.sampled_from("rgb"), PROMPT), max_size=12))
def test_prefixes_of_groups_are_the_longest_sent_before(prompts: list[tuple[str, array[int]]]) -> None:
    prefixes = GroupPrefixes()
    sent: list[tuple[str, array[int]]] = []

    def longest(tokens: array[int], others: list[array[int]]) -> int:
        ends = range(0, len(tokens) + 1, STEP_TOKENS)
        return max(end for end in ends if not end or any(one[:end] == tokens[:end] for one in others))

    for group, tokens in prompts:
        own = longest(tokens, [one for name, one in sent if name == group])
        other = longest(tokens, [one for name, one in sent if name != group])
        assert prefixes.add(group, "m", "", tokens) == (own, other)
        assert max(own, other) <= len(tokens)
        sent.append((group, tokens))


@given(st.lists(PROMPT, max_size=12))
def test_one_group_alone_has_no_price(prompts: list[array[int]]) -> None:
    prefixes = GroupPrefixes()
    assert not any(prefixes.add("red", "m", "", tokens)[1] for tokens in prompts)


def test_prefixes_are_of_one_model_and_adapter_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_prefixes, "PREFIXES_MAX", 20)
    prefixes, tokens = GroupPrefixes(), array("i", range(100 * STEP_TOKENS))
    prefixes.add("red", "m", "", tokens)
    assert prefixes.add("blue", "m", "adapter", tokens) == (0, 0)
    assert prefixes.add("blue", "n", "", tokens) == (0, 0)
    longest = 64 * STEP_TOKENS  # 16 steps, then 32 and 64 of them
    assert prefixes.stats.dropped == 3 * 18 - 20
    assert prefixes.add("red", "n", "", tokens) == (0, longest)
    for number in range(GROUPS_MAX + 1):
        prefixes.add(f"group {number}", "n", "", tokens)
    assert prefixes.add("red", "n", "", tokens) == (0, longest), "the latest groups are known"
