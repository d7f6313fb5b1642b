"""Tenants' use at several processes: whatever happens to messages, totals converge and nothing sticks."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.admission.others_use import SILENCE_S, OthersUse, Use, Uses
from kvatlas.router.admission.tenants import Tenant, TenantRequest
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.work import Work
from tests.support.examples import examples

NAMES = ("a", "b", "c")
PLENTY = 10**6
RULES = TenantRules(requests_per_minute=PLENTY, uncached_tokens_per_minute=PLENTY)


class Process:
    """One tenant's account at one process, and what it hears of the others."""

    def __init__(self, rules: TenantRules = RULES, life: int = 0) -> None:
        self.tenant = Tenant("t", rules, 0.0)
        self.life, self.beat, self.refused = life, 0, 0
        self.others = OthersUse(self, self._refuse)
        self.requests: list[TenantRequest] = []

    def _refuse(self) -> None:
        self.refused += 1

    def used_elsewhere(self, other: Hashable, tenant: str, before: Use | None, use: Use) -> bool:
        return self.tenant.used_elsewhere(other, before, use, 0.0)

    def forget_other(self, other: Hashable) -> None:
        self.tenant.forget_other(other)

    def knows(self, tenant: str) -> bool:
        return tenant == "t"

    def says(self, *, whole: bool = True) -> Uses:
        self.beat += 1
        use = self.tenant.use(0.0)
        return Uses(self.life, self.beat, whole, {} if use is None else {"t": use})

    def works(self, tokens: int) -> None:
        """A request begins, or the oldest one ends and turns out to have cost that."""
        if tokens % 2 and self.requests:
            request = self.requests.pop(0)
            request.placed(Work(tokens // 2, tokens))
            request.leave(None)
            return
        request = TenantRequest(self.tenant, lambda: 0.0)
        request.placed(Work(tokens, tokens))
        self.requests.append(request)

    @property
    def left(self) -> tuple[float, float]:
        headers = dict(self.tenant.headers(0.0))
        return (
            float(headers[b"x-ratelimit-remaining-requests"]),
            float(headers[b"x-ratelimit-remaining-tokens"]),
        )

    @property
    def used(self) -> tuple[float, float]:
        """By its own requests."""
        stats = self.tenant.stats
        return float(stats.requests), float(stats.uncached_tokens)

    def active_elsewhere(self) -> int:
        return sum(uses["t"].active for uses in self.others.totals().values() if "t" in uses)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.sampled_from(NAMES), st.integers(0, 100)),
        st.tuples(st.just("say"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("deliver"), st.integers(0, 30), st.sampled_from(["once", "again", "lost"])),
    ),
    max_size=60,
)
replacements = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(NAMES)), max_size=3)


def play(happens: list[tuple[str, object, object]], replaced: list[tuple[int, str]]) -> dict[str, Process]:
    """Any events in any order; at the end each replica reports once, and each receives it."""
    fleet = {name: Process() for name in NAMES}
    on_the_way: list[tuple[str, str, Uses]] = []
    greet(fleet)
    for number, (what, which, how) in enumerate(happens):
        for at, name in replaced:
            if at == number:
                fleet[name] = Process(life=fleet[name].life + 1)
        if what == "work":
            fleet[str(which)].works(int(how))  # type: ignore[call-overload]
        elif what == "say":
            said = fleet[str(which)].says(whole=bool(how))
            on_the_way += [(str(which), to, said) for to in NAMES if to != which]
        elif on_the_way:
            at = int(which) % len(on_the_way)  # type: ignore[call-overload]
            sender, to, said = on_the_way[at] if how == "again" else on_the_way.pop(at)
            if how != "lost":
                fleet[to].others.receive(sender, said, 0.0)
    for sender, to, said in on_the_way:
        fleet[to].others.receive(sender, said, 0.0)
    greet(fleet)
    for sender, to, said in on_the_way:  # and late ones change nothing any more
        fleet[to].others.receive(sender, said, 0.0)
    return fleet


def greet(fleet: dict[str, Process]) -> None:
    messages = {name: one.says() for name, one in fleet.items()}
    for to, one in fleet.items():
        for sender, uses in messages.items():
            if sender != to:
                one.others.receive(sender, uses, 0.0)


@settings(max_examples=examples(400))
@given(steps)
def test_totals_converge_whatever_is_lost_late_or_doubled(happens: list[tuple[str, object, object]]) -> None:
    fleet = play(happens, [])
    used = [sum(one.used[unit] for one in fleet.values()) for unit in (0, 1)]
    for one in fleet.values():
        assert one.left == (PLENTY - used[0], PLENTY - used[1])
        assert one.refused == 0


@settings(max_examples=examples(400))
@given(steps, replacements)
def test_no_request_stays_active_and_none_is_forgotten(
    happens: list[tuple[str, object, object]], replaced: list[tuple[int, str]]
) -> None:
    fleet = play(happens, replaced)
    for name, one in fleet.items():
        elsewhere = sum(other.tenant.stats.active for to, other in fleet.items() if to != name)
        assert one.active_elsewhere() == elsewhere
        totals = {to: uses["t"] for to, uses in one.others.totals().items() if "t" in uses}
        for to, other in fleet.items():
            use = other.tenant.use(0.0)
            if to != name and use is not None and use.requests:
                assert totals[to].requests == use.requests
                assert totals[to].tokens - totals[to].tokens_refunded == other.used[1]
        assert one.refused == 0


@settings(max_examples=examples(200))
@given(steps, replacements)
def test_a_replaced_process_has_no_more_left_than_a_sibling_used(
    happens: list[tuple[str, object, object]], replaced: list[tuple[int, str]]
) -> None:
    fleet = play(happens, replaced)
    for one in fleet.values():
        assert one.left[0] <= PLENTY - max(other.used[0] for other in fleet.values())


def test_a_successors_use_is_charged_to_its_siblings_in_full() -> None:
    one, two = Process(), Process()
    two.works(10)
    one.others.receive("two", two.says(), 0.0)
    successor = Process(life=1)
    successor.works(20)
    successor.works(30)
    one.others.receive("two", successor.says(), 1.0)
    assert one.left == (PLENTY - 3, PLENTY - 60)


def test_a_silent_or_lost_replica_has_no_active_requests() -> None:
    one, two = Process(TenantRules(concurrent_requests=1)), Process(TenantRules(concurrent_requests=1))
    two.works(2)
    ends = (
        lambda: one.others.forget("two"),
        lambda: one.others.keep(["three"]),
        lambda: one.others.age(SILENCE_S + 1),
    )
    for ended in ends:
        one.others.receive("two", two.says(), 0.0)
        with pytest.raises(ApiError, match="concurrent"):
            TenantRequest(one.tenant, lambda: 0.0)
        ended()
        TenantRequest(one.tenant, lambda: 0.0).leave(None)


def test_a_life_that_looks_older_counts_once_the_newer_one_is_silent() -> None:
    """A clock was set back between two starts of one replica."""
    one, late, now = Process(), Process(life=5), Process(life=9)
    now.works(2)
    one.others.receive("x", now.says(), 0.0)
    one.others.receive("x", late.says(), 1.0)
    assert one.active_elsewhere() == 1
    one.others.receive("x", late.says(), SILENCE_S + 1)
    assert one.active_elsewhere() == 0


def test_active_requests_of_a_silent_process_do_not_count() -> None:
    """Its last message stays in Redis for a minute; a forged number is got over."""
    one, two = Process(), Process()
    two.works(2)
    left_behind = two.says()
    forged = msgspec.structs.replace(left_behind, beat=2**40)
    for last in (left_behind, forged):
        one.others.receive("two", last, 0.0)
        for now in range(1, 20):
            one.others.receive("two", last, float(now))
        assert one.active_elsewhere() == 0
        one.others.receive("two", two.says(), 20.0)
        one.others.receive("two", two.says(), 20.1)
        assert one.active_elsewhere() == 1
        one.others.forget("two")


def test_a_total_that_falls_is_refused_and_what_comes_after_it_counts() -> None:
    one, two = Process(), Process()
    one.others.receive("two", two.says(), 0.0)
    forged = Uses(two.life, two.beat + 1, True, {"t": Use(requests=500, tokens=500)})
    one.others.receive("two", forged, 0.0)
    left = one.left
    two.works(10)
    two.beat += 1
    one.others.receive("two", two.says(), 0.0)
    assert one.refused == 1
    two.works(10)
    one.others.receive("two", two.says(), 0.0)
    assert (one.left, one.refused) == ((left[0] - 1, left[1] - 10), 1)
    assert one.active_elsewhere() == 2


def test_no_more_processes_than_are_kept_track_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.admission.others_use.PROCESSES_MAX", 2)
    one = Process()
    for number in range(5):
        one.others.receive(number, Uses(1, 1, True, {"t": Use(active=1)}), 0.0)
    assert (one.active_elsewhere(), one.refused) == (2, 3)


def test_a_message_is_what_it_was_after_the_wire() -> None:
    two = Process()
    two.works(10)
    said = two.says()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Uses) == said
