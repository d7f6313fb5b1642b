"""Pulling a prefix from another engine's host memory: when it is chosen, and what is never promised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.engine_probe import EngineProbe
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.openai.members import at_once
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.placement.candidate import Candidate, PolicySettings, PullSettings
from kvatlas.router.placement.cost import Choice, choose, make_choice
from kvatlas.router.placement.load import LoadAccount
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.own_pulls import PullOrder, Pulls, Rests
from kvatlas.router.placement.pull import (
    PullSources,
    any_waits,
    link_busy_s,
    occupy_links,
    page_prices,
    with_pull,
)
from kvatlas.router.placement.rates import FleetRates
from tests.router.placement.candidates import changed, make_candidate

RATE = 1 / 8000
PROMPT = 40_000
LINK = 1e-6
KNOBS = PolicySettings()


def holder(queue_s: float, held: int = 36_000) -> list[Candidate]:
    """An engine that holds a long prefix, with a queue, and one that is free and holds nothing."""
    return [
        make_candidate(
            "holder", hit_tokens=held, shared_prefix_tokens=held, queue_s=queue_s, prefill_s_per_token=RATE
        ),
        make_candidate("free", prefill_s_per_token=RATE),
    ]


def pulled(
    candidates: list[Candidate],
    held: list[int],
    page_price: float = 1.0,
    s_per_token: float = LINK,
    **more: float,
) -> Choice:
    sources = PullSources(held, [0.0] * len(candidates), s_per_token, [page_price] * len(candidates), **more)
    return with_pull(choose(candidates, PROMPT, KNOBS), sources)


def test_a_prefix_is_pulled_where_its_holder_is_busy() -> None:
    choice = pulled(holder(9.0), [36_000, 0])
    assert (choice.engine_id, choice.reason, choice.uncached_tokens) == ("free", "pull", 4000)
    assert choice.pull is not None
    assert (choice.pull.source_id, choice.pull.tokens, choice.pull.end) == ("holder", 36_000, 36_000)
    assert choice.pull.link_s == pytest.approx(0.036)
    assert choice.cost.prefill_s == pytest.approx(0.5)
    assert choice.cost.load_s == pytest.approx(0.036 + KNOBS.load_s_per_token * 36_000)


def test_no_pull_where_the_holder_answers_sooner() -> None:
    assert pulled(holder(0.01), [36_000, 0]).engine_id == "holder"
    assert pulled(holder(0.01), [36_000, 0]).pull is None
    assert pulled(holder(9.0), [36_000, 0], latency_s=10.0).pull is None


def test_an_engine_without_a_wait_is_no_source_whatever_else_it_costs() -> None:
    candidates = holder(0.01)
    candidates[0].recent_s = 60.0  # it had much work recently
    assert pulled(candidates, [36_000, 0], 0.0).pull is None


def test_a_holder_that_waits_for_pages_is_pulled_from() -> None:
    candidates = holder(0.0)
    candidates[0].room_s, candidates[0].running = 60.0, 8
    choice = pulled(candidates, [36_000, 0], 0.0)
    assert (choice.engine_id, choice.reason) == ("free", "pull")


def test_the_source_that_holds_most_is_taken_and_the_last_token_is_computed() -> None:
    candidates = [make_candidate("all", queue_s=9.0, prefill_s_per_token=RATE), *holder(9.0, 20_000)]
    choice = pulled(candidates, [PROMPT, 20_000, 0])
    assert choice.pull is not None
    assert (choice.pull.source_id, choice.pull.end, choice.uncached_tokens) == ("all", PROMPT - 1, 1)


def test_a_probe_stays_a_probe() -> None:
    scored = choose(holder(9.0), PROMPT, KNOBS).scored
    probe = make_choice(scored, 1, "probe")
    assert with_pull(probe, PullSources([36_000, 0], [0.0, 0.0], LINK, [0.0, 0.0])) is probe


@pytest.mark.parametrize(
    ("request_has", "prompt_has", "can"),
    [
        ({}, {}, True),
        ({"carried": "sidecar"}, {}, True),
        ({"carried": "gateway"}, {}, False),
        ({"pinned": "http://holder:1"}, {}, False),
        ({}, {"skips_cache": True}, False),
        ({}, {"variants": {"rust": None}}, False),
        ({"body": b'{"model": "m", "prompt": "p", "n": 2}'}, {}, False),
    ],
)
async def test_requests_to_which_no_source_can_be_added(
    request_has: dict[str, Any], prompt_has: dict[str, Any], can: bool
) -> None:
    body = b'{"model": "m", "prompt": "p"}'
    asked: Any = {"carried": "", "pinned": None, "path": "/v1/completions", "body": body, **request_has}
    read: Any = {"skips_cache": False, "variants": {}, **prompt_has}
    pulls = Pulls()
    found = await pulls.body(SimpleNamespace(**asked), (), SimpleNamespace(**read))  # type: ignore[arg-type]
    assert (found is not None) is can
    assert sum(pulls.stats.not_possible.values()) == ("body" in request_has)


def test_without_any_wait_nothing_is_looked_up() -> None:
    assert not any_waits(holder(0.002))
    assert any_waits(holder(0.0021))
    short_of_pages = holder(0.0)
    short_of_pages[0].room_s = 1.0
    assert any_waits(short_of_pages)


def test_host_memory_that_holds_nothing_is_no_source() -> None:
    assert pulled(holder(9.0), [0, 0]).pull is None


def test_a_pair_that_is_not_allowed_does_not_pull() -> None:
    candidates = holder(9.0)
    sources = PullSources([36_000, 0], [0.0, 0.0], LINK, [1.0, 1.0], allowed=lambda target, source: False)
    assert with_pull(choose(candidates, PROMPT, KNOBS), sources).pull is None


def test_an_engine_that_replays_a_window_does_not_pull() -> None:
    candidates = holder(9.0)
    candidates[1].hit.replay_tokens = 128
    assert pulled(candidates, [36_000, 0]).pull is None


def test_a_busy_link_waits_and_is_free_again() -> None:
    target, source, other = (LoadAccount(FleetRates().engine()) for _ in range(3))
    occupy_links(target, source, 0.5, 5.0)
    assert link_busy_s(target, None, 5.0) == link_busy_s(source, None, 5.0) == pytest.approx(0.5)
    assert link_busy_s(target, None, 6.0) == link_busy_s(other, None, 5.0) == 0.0
    assert link_busy_s(target, OthersLoad(link_ms=400), 5.2) == pytest.approx(0.4), "the later end"
    assert link_busy_s(target, OthersLoad(link_ms=200), 5.2) == pytest.approx(0.3)


_CANDIDATE = st.builds(
    lambda held, more, queue_s, running: (held, min(held + more, PROMPT), queue_s, running),
    st.integers(0, PROMPT),
    st.integers(0, 5000),
    st.floats(0, 20),
    st.integers(0, 20),
)


@given(st.lists(_CANDIDATE, min_size=1, max_size=6), st.data())
def test_a_pull_is_cheaper_than_every_engine_and_promises_what_its_source_holds(
    drawn: list[tuple[int, int, float, int]], data: st.DataObject
) -> None:
    candidates = [
        make_candidate(
            f"e{n}",
            hit_tokens=held,
            shared_prefix_tokens=shared_prefix,
            queue_s=queue_s,
            running=running,
            prefill_s_per_token=RATE,
        )
        for n, (held, shared_prefix, queue_s, running) in enumerate(drawn)
    ]
    held = data.draw(st.lists(st.integers(0, PROMPT), min_size=len(drawn), max_size=len(drawn)))
    busy = data.draw(st.lists(st.floats(0, 3), min_size=len(drawn), max_size=len(drawn)))
    prices = data.draw(st.lists(st.floats(0, 1), min_size=len(drawn), max_size=len(drawn)))
    s_per_token = data.draw(st.sampled_from([LINK, 0.5 * RATE, 2 * RATE]))
    before = choose(candidates, PROMPT, KNOBS)
    choice = with_pull(before, PullSources(held, busy, s_per_token, prices))
    if choice.pull is None:
        assert choice is before
        return
    pull, target, source = choice.pull, candidates[choice.index], candidates[choice.pull.source]
    assert choice.reason == "pull"
    assert pull.source != choice.index
    assert pull.end <= min(held[pull.source], PROMPT - 1)
    assert 0 < pull.tokens == pull.end - min(target.hit.whole_tokens, PROMPT - 1)
    assert choice.uncached_tokens == PROMPT - pull.end
    assert choice.cost.total_s < min(before.scored.totals)
    assert pull.link_s < max(source.queue_s, source.room_s), "else it is served sooner at its source"
    computed_s = RATE * (PROMPT - min(target.hit.whole_tokens, PROMPT - 1))
    assert choice.cost.first_token_s - choice.cost.wait_s < computed_s, "never slower than computing there"


def test_where_pages_are_free_a_shorter_wait_is_worth_a_pull() -> None:
    price = KNOBS.delay * 2  # of a second of computing, beside that second
    wait_s = 0.5 * price * RATE * 36_000

    def busy(queue_s: float) -> list[Candidate]:
        return [changed(one, running=2) for one in holder(queue_s)]

    assert pulled(busy(wait_s), [36_000, 0], 1.0).pull is None
    choice = pulled(busy(wait_s), [36_000, 0], 0.0)
    assert choice.reason == "pull"
    cost = choice.cost
    assert cost.delay_s == pytest.approx(price * RATE * 4000)
    parts_s = cost.queue_s + cost.prefill_s + cost.load_s + cost.decode_s + cost.delay_s - cost.credit_s
    assert cost.total_s == pytest.approx(parts_s)
    half = pulled(busy(9.0), [36_000, 0], 0.5).cost
    full = pulled(busy(9.0), [36_000, 0], 1.0).cost
    assert full.total_s - half.total_s == pytest.approx(0.5 * KNOBS.eviction_premium * RATE * 36_000)


def test_a_link_that_is_slower_than_computing_pulls_nothing() -> None:
    assert pulled(holder(60.0), [36_000, 0], 0.0, s_per_token=RATE).pull is None
    assert pulled(holder(60.0), [36_000, 0], 0.0, s_per_token=0.8 * RATE).pull is not None


def test_pages_have_their_whole_price_while_prompts_wait_for_them_anywhere() -> None:
    groups = (GroupSpec(0, "full_attention", 16),)
    loads = [LoadAccount(FleetRates().engine()) for _ in range(3)]
    assert page_prices(loads, 1600) == [1.0, 1.0, 1.0], "pools of unknown size"
    for load in loads[:2]:
        load.pages.configure(1000, groups)
    assert page_prices(loads, 1600) == pytest.approx([0.1, 0.1, 1.0])
    loads[0].admit(uncached_tokens=1, now=0.0, prompt_tokens=8000)
    assert page_prices(loads[:2], 1600) == pytest.approx([0.6, 0.1])
    assert page_prices(loads[:2], 15_000) == pytest.approx([1.0, 0.938])
    loads[0].admit(uncached_tokens=1, now=0.0, prompt_tokens=9600)
    assert page_prices(loads[:2], 1600) == [1.0, 1.0]


# -- the router's own pulls -----------------------------------------------------------------------------

NAMES = "http://holder:1", "http://free:1"
HELD = {NAMES[0]: 36_000}
BODY = at_once(split_body("/v1/completions", b'{"model": "m", "prompt": "p"}'))


def engine(name: str, **changes: Any) -> Any:
    alike = {
        "version": "0.32.0",
        "base_model": "m",
        "layout": "groups",
        "scheme": "hashes",
        "frontend": "python",
        "closed": False,
        "probe": None,
        "feed": FeedStats(state=FeedState.READY),
        "load": LoadAccount(FleetRates().engine()),
    }
    return SimpleNamespace(engine_id=name, engine=EngineAddress(name), **{**alike, **changes})


def applied(
    pulls: Pulls | None = None,
    target: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
    now: float = 0.0,
    own: int = 0,
) -> tuple[Choice, PullOrder | None]:
    if pulls is None:
        pulls = Pulls()
        pulls.configure(PullSettings(enabled=True), 5710)
    found = [changed(one, engine_id=name, running=2) for name, one in zip(NAMES, holder(9.0), strict=True)]
    found[1] = changed(found[1], hit_tokens=own)
    engines = [engine(NAMES[0], **(source or {})), engine(NAMES[1], **(target or {}))]
    return pulls.apply(choose(found, PROMPT, KNOBS), engines, HELD, BODY, now)


def test_the_order_names_the_source_and_the_hit_that_is_to_come() -> None:
    choice, order = applied()
    assert choice.reason == "pull"
    assert order is not None
    assert (order.source.engine_id, order.kv_source.host, order.kv_source.port) == (NAMES[0], "holder", 5710)
    assert (order.hit.whole_tokens, order.hit.cpu_tokens, order.pull.tokens) == (36_000, 36_000, 36_000)
    assert order.saved_s == pytest.approx(36_000 * (RATE - KNOBS.load_s_per_token) - order.pull.link_s)
    _, order = applied(own=1600)
    assert order is not None
    assert (order.hit.gpu_tokens, order.hit.cpu_tokens, order.pull.tokens) == (1600, 34_400, 34_400)


@pytest.mark.parametrize(
    "change",
    [
        {"version": None},
        {"version": "0.33.0"},
        {"base_model": "other"},
        {"layout": None},
        {"layout": "other groups"},
        {"scheme": "other hashes"},
    ],
)
def test_engines_that_differ_are_never_paired(change: dict[str, Any]) -> None:
    assert applied(target=change)[1] is None
    assert applied(source=change)[1] is None


@pytest.mark.parametrize(
    "change",
    [
        {"frontend": "sglang"},
        {"closed": True},
        {"feed": None},
        {"feed": FeedStats(state=FeedState.DEGRADED)},
        {"feed": FeedStats(state=FeedState.READY, unconfirmed=True)},
        {"feed": FeedStats(state=FeedState.REPLAYING)},
    ],
)
def test_an_engine_of_which_events_are_missing_is_no_source(change: dict[str, Any]) -> None:
    assert applied(source=change)[1] is None


@pytest.mark.parametrize("verdict", ["proven", "unshown", "refuted"])
def test_a_source_that_does_not_answer_its_probe_is_left_alone(verdict: Any) -> None:
    probe = EngineProbe("m", pull_source=Shown(verdict))
    assert (applied(source={"probe": probe})[1] is not None) == (verdict == "proven")
    assert applied(target={"probe": probe})[1] is not None, "it pulls as before"
    assert applied(source={"probe": EngineProbe("m")})[1] is not None


def test_two_unknown_versions_are_not_equal() -> None:
    assert applied(target={"version": None}, source={"version": None})[1] is None


def outcome_of(order: PullOrder, actual: int | None, ttft_s: float | None) -> str:
    return Pulls().judge(order, order.came_tokens(actual), 0.6, ttft_s)


@pytest.mark.parametrize(
    ("actual", "ttft_s", "outcome"),
    [
        (36_000, 0.7, "complete"),
        (36_000, None, "complete"),
        (18_000, 0.7, "partial"),
        (17_999, 0.7, "missed"),
        (0, 5.0, "missed"),
        (36_000, 4.9, "late"),
        (36_000, 4.7, "complete"),
        (None, 9.0, "unreported"),
    ],
)
def test_a_pull_is_late_if_computing_would_have_been_sooner(
    actual: int | None, ttft_s: float | None, outcome: str
) -> None:
    _, order = applied()
    assert order is not None
    assert outcome_of(order, actual, ttft_s) == outcome


@pytest.mark.parametrize(
    ("actual", "came"), [(900, 700), (1000, 700), (500, 300), (200, 0), (100, 0), (None, None)]
)
def test_a_pulls_result_is_the_hit_beyond_the_engines_own(actual: int | None, came: int | None) -> None:
    _, order = applied()
    assert order is not None
    hit = msgspec.structs.replace(order.hit, gpu_tokens=200, cpu_tokens=700)
    part = msgspec.structs.replace(order, pull=msgspec.structs.replace(order.pull, tokens=700), hit=hit)
    assert part.came_tokens(actual) == came


def test_a_bad_pair_rests_and_every_other_pair_goes_on() -> None:
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True), 5710)
    target: Any = NAMES[1]
    _, order = applied(pulls)
    assert order is not None
    pulls.end(target, order, "missed", 0.0)
    assert applied(pulls, now=9.9)[1] is None
    assert pulls.pairs.allows(NAMES[0], NAMES[1], now=0.0), "only in this direction"
    assert pulls.pairs.allows("http://other:1", NAMES[0], now=0.0)
    assert pulls.sources.allows(NAMES[0], now=0.0)
    assert applied(pulls, now=10.0)[1] is not None
    pulls.end(target, order, "late", 10.0)
    assert applied(pulls, now=29.9)[1] is None
    pulls.end(target, order, "complete", 30.0)
    pulls.end(target, order, "failed", 30.0)
    assert applied(pulls, now=40.0)[1] is not None, "a good pull in between starts over"
    assert pulls.stats.pulls == {"missed": 1, "late": 1, "complete": 1, "failed": 1}
    assert pulls.stats.rests == 3
    assert pulls.stats.source_rests == 1


@pytest.mark.parametrize("outcome", ["missed", "late"])
def test_a_source_rests_for_every_target_after_two_bad_pulls(outcome: Any) -> None:
    """Before, each of N targets paid the time-out of a handshake."""
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True), 5710)
    _, order = applied(pulls)
    assert order is not None
    source = EngineAddress(NAMES[0])
    for number in range(2):
        assert pulls.resting_source(source) is None
        assert applied(pulls)[1] is not None
        pulls.end(f"http://other{number}:1", order, outcome, 0.0)
    assert applied(pulls)[1] is None, "a target that never pulled from it"
    assert applied(pulls, now=10.0)[1] is not None
    assert pulls.resting_source(source) == (2, "holder:5710", False)
    given = msgspec.structs.replace(source, kv_source="10.0.0.1:6000")
    assert pulls.resting_source(given) == (2, "10.0.0.1:6000", True)
    pulls.end("http://other2:1", order, outcome, 10.0)
    assert applied(pulls, now=29.9)[1] is None, "twice as long"
    pulls.end("http://other3:1", order, "complete", 30.0)
    assert pulls.resting_source(source) is None


@pytest.mark.parametrize("outcome", ["failed", "unsent"])
def test_a_target_that_gives_no_answer_rests_no_source(outcome: Any) -> None:
    """Engines that answer 429 do not pull; a request that the router took back is no evidence."""
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True), 5710)
    _, order = applied(pulls)
    assert order is not None
    for number in range(5):
        pulls.end(f"http://other{number}:1", order, outcome, 0.0)
    pulls.end(NAMES[1], order, outcome, 0.0)
    assert pulls.resting_source(EngineAddress(NAMES[0])) is None
    assert (applied(pulls)[1] is None) == (outcome == "failed")


def test_one_pull_proves_a_source_before_others_follow() -> None:
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True), 5710)
    target = engine(NAMES[1])
    _, order = applied(pulls)
    assert order is not None
    pulls.begin(target, order, 0.0)
    assert applied(pulls)[1] is None, "the first one is under way"
    assert applied(pulls, now=60.0)[1] is not None, "it was lost"
    pulls.end("http://other:1", order, "complete", 0.0)
    pulls.begin(target, order, 0.0)
    assert applied(pulls)[1] is not None, "it is proven"
    for _ in range(2):
        pulls.end("http://other:1", order, "missed", 0.0)
    pulls.begin(target, order, 20.0)
    assert applied(pulls, now=20.0)[1] is None, "it is to be proven again"


def test_rests_end_and_are_bounded() -> None:
    pairs = Rests()
    for _ in range(100):
        pairs.bad("t", "s", now=0.0)
    assert not pairs.allows("t", "s", now=599.0)
    assert pairs.allows("t", "s", now=600.0)
    for number in range(5000):
        pairs.bad(f"t{number}", "s", now=0.0)
    assert pairs.allows("t", "s", now=0.0), "the oldest is forgotten"
    assert not pairs.allows("t4999", "s", now=0.0)


def test_a_chosen_pull_occupies_both_links() -> None:
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True, gbit_s=1.0), 5710)
    _, order = applied(pulls)
    assert order is None, "36,000 tokens of 100 KiB take half a minute at 1 Gbit/s"
    pulls.configure(PullSettings(enabled=True, gbit_s=25.0), 5710)
    _, order = applied(pulls)
    assert order is not None
    target = engine(NAMES[1])
    pulls.end("http://other:1", order, "complete", 0.0)  # it is proven
    pulls.begin(target, order, 0.0)
    assert order.source.load.link_free_s == target.load.link_free_s == pytest.approx(order.pull.link_s)
    _, second = applied(pulls, source={"load": order.source.load})
    assert second is not None
    assert second.pull.link_s == pytest.approx(2 * order.pull.link_s)


@pytest.mark.parametrize("busy", NAMES)
def test_a_link_that_another_router_uses_is_waited_for(busy: str) -> None:
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True), 5710)
    _, alone = applied(pulls)
    assert alone is not None
    pulls.others = {busy: OthersLoad(link_ms=1500)}
    _, beside = applied(pulls)
    assert beside is not None
    assert beside.pull.link_s == pytest.approx(alone.pull.link_s + 1.5)
    pulls.others = {busy: OthersLoad(link_ms=9000)}
    assert applied(pulls)[1] is None, "then its holder serves the prompt sooner"
    pulls.others = None
    _, unknown = applied(pulls)
    assert unknown is not None
    assert unknown.pull.link_s == alone.pull.link_s
