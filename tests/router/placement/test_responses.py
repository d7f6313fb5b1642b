"""Which engine holds which response: learned, bounded, forgotten with the engine."""

from __future__ import annotations

from router.fleet.status import HeldResponse, ResponseHolders


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


def test_a_response_stays_with_the_tenant_it_was_first_seen_of() -> None:
    holders = ResponseHolders()
    holders.record("r1", "a", "acme")
    holders.record("r1", "b", "other")
    assert holders.known("r1") == ("a", "acme")
    holders.record("r1", "b", "acme")
    assert holders.known("r1") == ("b", "acme")


async def test_others_are_asked_once_for_what_is_not_known_here() -> None:
    holders, told = ResponseHolders(), []
    asked = []

    async def source(response_id: str) -> HeldResponse | None:
        asked.append(response_id)
        return HeldResponse("a", "acme") if response_id == "r1" else None

    holders.sources.append(source)
    holders.listeners.append(lambda response_id, held: told.append((response_id, held)))
    assert await holders.find("r1") == await holders.find("r1") == ("a", "acme")
    assert await holders.find("r2") is None
    assert await holders.find("x" * 1000) is None
    assert asked == ["r1", "r2"]
    assert told == []  # it is told by who made it
    holders.record("r3", "a", "acme")
    assert told == [("r3", ("a", "acme"))]
