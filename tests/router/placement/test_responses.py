"""Which engine holds which response: learned, bounded, forgotten with the engine."""

from __future__ import annotations

from router.fleet.response_holders import ResponseHolders


def test_what_was_told_is_found() -> None:
    holders = ResponseHolders()
    holders.record("r1", "a")
    holders.record("r2", "b")
    holders.record("r1", "b")
    assert holders.holder("r1") == "b"
    assert holders.holder("r3") is None
    assert holders.holder(None) is None


def test_the_oldest_go_first_and_odd_ids_are_not_kept() -> None:
    holders = ResponseHolders(responses_max=2)
    for number in range(4):
        holders.record(f"r{number}", "a")
    holders.record("x" * 1000, "a")
    assert [holders.holder(f"r{n}") for n in range(4)] == [None, None, "a", "a"]
    assert len(holders) == 2


def test_an_engine_takes_its_responses_with_it() -> None:
    holders = ResponseHolders()
    holders.record("r1", "a")
    holders.record("r2", "b")
    holders.forget("a")
    assert holders.holder("r1") is None
    assert holders.holder("r2") == "b"
