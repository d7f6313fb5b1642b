"""Sources and administrators disagree: who wins, what holds, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.fleet.engines import ORDER, DesiredState, DiscoveredEngine, EngineAddress, FleetFullError
from kvatlas.router.fleet.status import Fleet

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def desired(engines_max: int = 100) -> DesiredState:
    return DesiredState(engines_max=engines_max)


def urls(of: DesiredState) -> list[str]:
    return [engine.base_url for engine in of.wanted().engines]


def see(
    url: str, held: str = "", identity: str = "", ends_s: float | None = None, **fields: str
) -> DiscoveredEngine:
    return DiscoveredEngine(EngineAddress(url, **fields), held, identity, ends_s)  # type: ignore[arg-type]


def test_a_server_is_wanted_while_any_source_names_it() -> None:
    r = desired()
    r.set_source("static", [see(A)])
    r.set_source("dns", [see(A), see(B)])
    assert urls(r) == [A, B]
    assert r.sources(A) == ["static", "dns"]
    r.set_source("dns", [])
    assert urls(r) == [A]


def test_addresses_are_those_of_the_first_source_that_names_it() -> None:
    r = desired()
    r.set_source("kubernetes", [see(A, events="tcp://k:1")])
    r.set_source("dns", [see(A, events="tcp://d:1")])
    assert r.wanted().engines == (EngineAddress(A, None, "tcp://k:1"),)
    r.set_source("file", [see(A, events="tcp://f:1")])
    assert r.wanted().engines == (EngineAddress(A, None, "tcp://f:1"),)
    r.add(EngineAddress(A, None, "tcp://admin:1"))
    assert r.wanted().engines == (EngineAddress(A, None, "tcp://admin:1"),)


def test_any_source_may_hold_it() -> None:
    r = desired()
    r.set_source("static", [see(A)])
    r.set_source("kubernetes", [see(A, "terminating")])
    assert r.wanted().holds == {A: "terminating"}
    r.drain(A, "ann")
    assert r.wanted().holds == {A: "drained by ann"}
    assert r.undrain(A)
    assert not r.undrain(A)
    assert r.wanted().holds == {A: "terminating"}


def test_the_sooner_end_of_a_drained_engine_counts() -> None:
    r = desired()
    r.set_source("static", [see(A), see(B)])
    r.set_source("kubernetes", [see(A, "terminating", ends_s=200.0)])
    fleet: Fleet[Any] = Fleet()

    def ends() -> list[float | None]:
        fleet.assign(r.wanted())
        return [fleet.get(url).ends_s for url in (A, B)]  # type: ignore[union-attr]

    assert ends() == [200.0, None]
    for ends_s, expected in ((100.0, 100.0), (300.0, 200.0), (None, 200.0)):
        r.drain(A, "ann", ends_s)
        r.drain(B, "ann", ends_s)
        assert ends() == [expected, ends_s]
        # Decisions about a pod name it as soon as it is known.
        r.set_source("static", [see(A), see(B, identity="pod-1")])
        assert ends() == [expected, ends_s]
    r.drain(B, "ann", 50.0)
    other = desired()
    other.set_source("static", [see(A), see(B)])
    other.adopt(r.decisions())
    assert other.wanted().ends_s[B] == 50.0
    r.undrain(B)
    assert ends() == [200.0, None]


def test_removed_is_out_until_it_is_added_again() -> None:
    r = desired()
    r.set_source("static", [see(A), see(B)])
    assert r.remove(A, "ann")
    assert not r.remove(A, "ann")
    assert urls(r) == [B]
    r.set_source("file", [see(A)])
    assert urls(r) == [B]
    assert r.removed[A].by == "ann"
    assert r.add(EngineAddress(A))
    assert urls(r) == [B, A]
    assert r.removed == {}
    assert not r.add(EngineAddress(A))


def test_removed_is_over_when_no_source_names_it_any_more() -> None:
    r = desired()
    r.set_source("kubernetes", [see(A)])
    r.remove(A, "ann")
    r.set_source("kubernetes", [])
    assert r.removed == {}
    r.set_source("kubernetes", [see(A)])
    assert urls(r) == [A]


def test_a_hold_of_a_pod_does_not_apply_to_the_next_at_its_address() -> None:
    r = desired()
    r.set_source("kubernetes", [see(A, identity="one"), see(B, identity="two")])
    r.remove(A, "ann")
    r.drain(B, "ann")
    r.set_source("kubernetes", [see(A, identity="one"), see(B, identity="two")])
    assert (urls(r), r.wanted().holds) == ([B], {B: "drained by ann"})
    r.set_source("kubernetes", [see(A, identity="three"), see(B, identity="four")])
    assert (sorted(urls(r)), r.wanted().holds) == ([A, B], {})


def test_a_decision_made_before_the_pod_was_known_is_about_the_pod() -> None:
    r = desired()
    r.set_source("static", [see(A)])
    r.remove(A, "ann")
    r.set_source("kubernetes", [see(A, identity="one")])
    assert urls(r) == []
    r.set_source("kubernetes", [see(A, identity="two")])
    assert urls(r) == [A]


def test_an_added_engine_without_another_source_is_gone_when_removed() -> None:
    r = desired()
    r.add(EngineAddress(A))
    assert r.sources(A) == ["admin"]
    assert r.remove(A, "ann")
    assert r.removed == {}
    assert urls(r) == []


def test_a_drain_ends_with_its_server() -> None:
    r = desired()
    r.set_source("dns", [see(A)])
    r.drain(f"{A}#dp1", "ann")
    r.set_source("dns", [])
    assert r.drained == {}


def test_ranks_are_added_one_by_one_and_replace_the_whole_server() -> None:
    r = desired()
    r.add(EngineAddress(A))
    r.add(EngineAddress(A, 0))
    r.add(EngineAddress(A, 1))
    assert r.wanted().engines == (EngineAddress(A, 0), EngineAddress(A, 1))
    r.add(EngineAddress(A))
    assert r.wanted().engines == (EngineAddress(A),)


def test_the_number_of_engines_is_bounded() -> None:
    r = desired(2)
    r.set_source("dns", [see(B), see(C)])
    r.set_source("static", [see(A)])
    assert (urls(r), r.left_out) == ([B, C], 1)  # who is in stays in
    with pytest.raises(FleetFullError):
        r.add(EngineAddress("http://d:1"))
    r.add(EngineAddress(B, None, "tcp://b:1"))  # one that is in may change
    r.set_source("dns", [see(C)])
    assert sorted(urls(r)) == [B, C]
    r.remove(B, "ann")
    assert (urls(r), r.left_out) == ([C, A], 0)


sightings = st.lists(
    st.builds(
        see,
        st.sampled_from([A, B, C]),
        st.sampled_from(["", "not ready", "terminating"]),
        st.sampled_from(["", "one", "two"]),
    ),
    max_size=4,
    unique_by=lambda one: one.engine.base_url,
)
tellings = st.lists(st.tuples(st.sampled_from(ORDER[1:]), sightings), max_size=8)


@given(tellings, st.randoms(use_true_random=False))
def test_the_latest_lists_make_the_roster_in_any_order(
    told: list[tuple[str, list[DiscoveredEngine]]], rng: object
) -> None:
    last = dict(told)
    one, other = desired(), desired()
    for source, seen in told:
        one.set_source(source, seen)
    mixed = list(last.items())
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    for source, seen in mixed:
        other.set_source(source, seen)
    ours, theirs = one.wanted(), other.wanted()
    assert set(ours.engines) == set(theirs.engines)
    assert (ours.holds, ours.identities) == (theirs.holds, theirs.identities)


actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(ORDER[1:]), sightings),
        st.tuples(st.sampled_from(["add", "remove", "drain", "undrain"]), st.sampled_from([A, B, C])),
    ),
    max_size=20,
)


@given(actions)
def test_the_fleet_is_always_what_the_roster_says(steps: list[tuple[str, object]]) -> None:
    r, fleet = desired(2), Fleet()
    named: dict[str, list[DiscoveredEngine]] = {}
    for kind, what in steps:
        if kind in ORDER:
            named[kind] = what  # type: ignore[assignment]
            r.set_source(kind, what)  # type: ignore[arg-type]
        elif kind == "add":
            try:
                r.add(EngineAddress(what))  # type: ignore[arg-type]
            except FleetFullError:
                continue
        else:
            getattr(r, kind)(what, *(("ann",) if kind != "undrain" else ()))
        wanted = r.wanted()
        before = {s.engine_id: s for s in fleet}
        changes = fleet.assign(wanted)
        assert [s.engine for s in fleet] != [] or wanted.engines == ()
        assert {s.engine for s in fleet} == set(wanted.engines)
        for status in fleet:
            assert status.held == wanted.holds.get(status.engine_id, "")
            kept = status.engine.base_url not in (*changes.new, *changes.dropped)
            assert (before.get(status.engine_id) is status) == kept
        assert len(fleet) <= 2
        assert set(r.removed).isdisjoint(status.engine.base_url for status in fleet)
        in_sources = {s.engine.base_url for seen in named.values() for s in seen}
        assert set(r.removed) <= in_sources
