"""The fleet as last seen: ids are unique, readiness follows what was seen, replacing keeps what stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress, endpoint_of
from kvatlas.router.fleet.status import Fleet, ModelCard, Reassigned

URL = "http://h:1"


def up(fleet: Fleet, engine_id: str, *cards: ModelCard) -> None:
    status = fleet.get(engine_id)
    assert status is not None
    status.up, status.models = True, cards


def test_an_engine_never_seen_serves_nothing() -> None:
    fleet = Fleet([EngineAddress(URL)])
    assert len(fleet) == 1
    assert fleet.ready(None) == []
    assert not fleet.knows("m")
    assert fleet.model_cards() == []


def test_ready_engines_answer_are_not_held_and_serve_the_model() -> None:
    fleet = Fleet([EngineAddress(f"http://h:{n}") for n in range(4)])
    for n in range(3):
        up(fleet, f"http://h:{n}", ModelCard("a" if n else "b"))
    last = fleet.get("http://h:2")
    assert last is not None
    last.held = "drained"
    assert [s.engine_id for s in fleet.ready("a")] == ["http://h:1"]
    assert [s.engine_id for s in fleet.ready("b")] == ["http://h:0"]
    assert [s.engine_id for s in fleet.ready(None)] == ["http://h:0", "http://h:1"]
    last.up = False
    assert fleet.knows("a")
    assert not fleet.knows("c")


def test_cards_are_joined_with_the_length_that_fits_everywhere() -> None:
    fleet = Fleet([EngineAddress(f"http://h:{n}") for n in range(3)])
    up(fleet, "http://h:0", ModelCard("a", max_model_len=500), ModelCard("x", parent="a"))
    up(fleet, "http://h:1", ModelCard("a", max_model_len=300))
    up(fleet, "http://h:2", ModelCard("a"))
    assert [(c.id, c.max_model_len) for c in fleet.model_cards()] == [("a", 300), ("x", None)]


def test_the_base_model_is_the_first_card_without_a_parent() -> None:
    fleet = Fleet([EngineAddress(URL)])
    up(fleet, URL, ModelCard("lora", parent="base"), ModelCard("base"), ModelCard("alias"))
    status = fleet.get(URL)
    assert status is not None
    assert status.base_model == "base"
    assert status.serves("lora")


def test_ranks_replace_the_server_and_the_server_its_ranks() -> None:
    fleet = Fleet([EngineAddress("http://other"), EngineAddress(URL)])
    ranks = [EngineAddress(URL, 0, "tcp://h:1"), EngineAddress(URL, 1, "tcp://h:2")]
    assert fleet.replace(URL, ranks) == ([], [URL])
    assert [s.engine for s in fleet.ranks(URL)] == ranks
    assert fleet.configured(URL) == [EngineAddress(URL)]
    up(fleet, f"{URL}#dp0", ModelCard("m"))
    moved = EngineAddress(URL, 0, "tcp://h:9")
    assert fleet.replace(URL, [moved, ranks[1]]) == ([f"{URL}#dp0"], [])
    status = fleet.get(f"{URL}#dp0")
    assert status is not None
    assert (status.engine, status.up) == (moved, True)  # it only moved
    assert fleet.replace(URL, fleet.configured(URL)) == ([], [f"{URL}#dp0", f"{URL}#dp1"])
    assert [s.engine_id for s in fleet] == ["http://other", URL]


def test_an_engine_that_stays_is_known_and_a_replaced_one_is_not() -> None:
    fleet = Fleet()
    a, b = "http://a:1", "http://b:1"
    assert fleet.assign(
        DesiredFleet((EngineAddress(a), EngineAddress(b)), {b: "not ready"}, {a: "pod-1"})
    ).new == [a, b]
    up(fleet, a, ModelCard("m"))
    up(fleet, b, ModelCard("m"))
    assert [s.engine_id for s in fleet.ready("m")] == [a]
    assert fleet.assign(DesiredFleet((EngineAddress(a), EngineAddress(b)), {}, {a: "pod-1"})) == Reassigned()
    assert [s.engine_id for s in fleet.ready("m")] == [a, b]
    moved = fleet.assign(
        DesiredFleet((EngineAddress(a, None, "tcp://a:2"), EngineAddress(b)), {}, {a: "pod-1"})
    )
    assert (moved.touched, moved.moved, moved.gone) == ([a], [a], [])
    other = fleet.assign(
        DesiredFleet((EngineAddress(a, None, "tcp://a:2"), EngineAddress(b)), {}, {a: "pod-2"})
    )
    assert (other.dropped, other.new, other.gone) == ([a], [a], [a])
    assert [s.engine_id for s in fleet.ready("m")] == [b]
    gone = fleet.assign(DesiredFleet())
    assert (sorted(gone.dropped), sorted(gone.gone), len(fleet)) == ([a, b], [a, b], 0)


def test_a_held_server_holds_the_ranks_it_tells_of() -> None:
    fleet = Fleet()
    fleet.assign(DesiredFleet((EngineAddress(URL),), {URL: "terminating", f"{URL}#dp1": "drained"}))
    fleet.replace(URL, [EngineAddress(URL, 0, "tcp://h:1"), EngineAddress(URL, 1, "tcp://h:2")])
    assert [s.held for s in fleet] == ["terminating", "drained"]
    fleet.assign(DesiredFleet((EngineAddress(URL),), {f"{URL}#dp1": "drained"}))
    assert [(s.engine_id, s.held) for s in fleet] == [(f"{URL}#dp0", ""), (f"{URL}#dp1", "drained")]


engines = st.builds(
    EngineAddress,
    st.sampled_from(["http://a", "http://b"]),
    st.none() | st.integers(0, 3),
    st.none() | st.sampled_from(["tcp://h:1", "tcp://h:2"]),
)


@given(st.lists(engines, max_size=6), st.lists(st.lists(engines, max_size=4), max_size=5))
def test_replacing_always_ends_with_what_was_asked_for(
    first: list[EngineAddress], steps: list[list[EngineAddress]]
) -> None:
    fleet = Fleet(first)
    others = [s.engine for s in fleet if s.engine.base_url == "http://b"]
    for step in steps:
        wanted = {e.engine_id: e for e in step if e.base_url == "http://a"}
        before = {s.engine_id: s.engine for s in fleet.ranks("http://a")}
        changed, gone = fleet.replace("http://a", list(wanted.values()))
        assert {s.engine_id: s.engine for s in fleet.ranks("http://a")} == wanted
        assert set(gone) == set(before) - set(wanted)
        assert set(changed) == {i for i, e in wanted.items() if i in before and before[i] != e}
    assert [s.engine for s in fleet if s.engine.base_url == "http://b"] == others
    assert len({s.engine_id for s in fleet}) == len(fleet)


@pytest.mark.parametrize(
    ("base_url", "endpoint"),
    [
        ("http://h:8000", "h:8000"),
        ("http://h", "h:80"),
        ("https://h", "h:443"),
        ("http://[::1]:1", "[::1]:1"),
        ("https://[::1]", "[::1]:443"),
    ],
)
def test_the_name_that_a_gateway_has_for_an_engine(base_url: str, endpoint: str) -> None:
    assert endpoint_of(base_url) == endpoint


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.10.2", True),
        ("0.32.0+cpu", True),
        ("0.11.0rc2.dev9+g1234567", True),
        ("1.0", True),
        ("0.10.1.1", False),
        ("0.9.2", False),
        ("dev", False),
        ("", False),
        (None, False),
    ],
)
def test_engines_give_ids_of_tokens_since_a_version(version: str | None, says: bool) -> None:
    (status,) = Fleet([EngineAddress(URL)])
    status.version = version
    assert status.says_ids is says


def test_the_context_length_of_an_engine_is_that_of_its_base_model() -> None:
    (status,) = Fleet([EngineAddress(URL)])
    status.models = (ModelCard("x", parent="a", max_model_len=7), ModelCard("a", max_model_len=9))
    assert [status.context_tokens(name) for name in (None, "a", "x")] == [9, 9, 7]
