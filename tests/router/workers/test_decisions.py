"""Decisions of the administrator reach every worker, whichever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engines import DesiredState, DiscoveredEngine, EngineAddress
from kvatlas.router.workers.context import LEAD, WorkerContext
from kvatlas.router.workers.decisions import SharedDecisions

E, F = "http://e", "http://f"


class Crew:
    """Workers and the calls between them; ``deaf`` ones answer none."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.deaf: set[int] = set()
        self.calls = 0


class Worker:
    """One worker's decisions. ``unsynced``: sources of engines that have not reported yet."""

    def __init__(self, crew: Crew, slot: int, life: int = 0) -> None:
        self._crew, self._slot = crew, slot
        self.desired = DesiredState(engines_max=10)
        self.unsynced: list[str] = []
        self.applied = 0
        context: Any = msgspec.structs.replace(CONTEXT, slot=slot, life=life)
        calls: Any = self
        self.decisions = SharedDecisions(
            context, self.desired, calls, applied=self._apply, unsynced=lambda: self.unsynced
        )
        crew.workers[slot] = self

    def report(self) -> None:
        self.desired.set_source("static", [DiscoveredEngine(EngineAddress(url)) for url in (E, F)])

    def _apply(self) -> None:
        self.applied += 1

    async def call_all(self, _path: str, *, method: str = "GET", body: bytes = b"") -> dict[int, bytes]:
        self._crew.calls += 1
        answers = {}
        for slot, worker in self._crew.workers.items():
            if slot == self._slot or slot in self._crew.deaf:
                continue
            if method == "PUT":
                worker.decisions.adopt(body)
            answers[slot] = worker.decisions.state()
        return answers


CONTEXT = WorkerContext(
    LEAD,
    2,
    life=0,
    public=[],
    ops=None,
    admin=None,
    control=None,  # type: ignore[arg-type]  # no calls are served here
    mesh={},
    folder=Path(),
    counters_fd=-1,
    ops_at="",
    started=lambda: None,
    parent=-1,
)


def crew_of_two() -> tuple[Crew, Worker, Worker]:
    crew = Crew()
    lead, other = Worker(crew, LEAD), Worker(crew, 1)
    lead.report()
    other.report()
    return crew, lead, other


async def test_a_change_is_sent_at_once_and_repeated_for_who_missed_it() -> None:
    crew, lead, other = crew_of_two()
    task = asyncio.create_task(lead.decisions.run())
    crew.deaf.add(1)
    lead.desired.drain(E, "ada")
    await lead.decisions.changed()
    assert not other.desired.drained
    crew.deaf.clear()
    await asyncio.sleep(1.5)
    assert other.desired.drained.keys() == {E}
    applied = other.applied
    await asyncio.sleep(3)
    assert other.applied == applied, "what is known is not applied again"
    # That nothing is decided any more is sent too, until it has arrived; then no more.
    lead.desired.undrain(E)
    await asyncio.sleep(1)
    assert not other.desired.drained
    calls = crew.calls
    await asyncio.sleep(5)
    assert crew.calls == calls
    task.cancel()


async def test_only_the_lead_sends() -> None:
    crew, _, other = crew_of_two()
    other.desired.drain(E, "ada")
    await other.decisions.run()  # ends
    assert crew.calls == 0


async def test_a_new_worker_does_not_ask_and_its_successor_asks_a_sibling() -> None:
    crew, lead, other = crew_of_two()
    other.desired.drain(E, "ada")
    await lead.decisions.restore()
    assert (crew.calls, lead.applied) == (0, 0)
    successor = Worker(crew, LEAD, life=1)
    successor.report()
    await successor.decisions.restore()
    assert successor.desired.decisions() == other.desired.decisions()
    assert successor.applied == 1


async def test_a_new_lead_applies_what_it_restored_until_its_sources_have_reported() -> None:
    crew, _, other = crew_of_two()
    other.desired.drain(E, "ada")
    successor = Worker(crew, LEAD, life=1)
    successor.unsynced = ["static"]
    await successor.decisions.restore()
    assert not successor.desired.drained, "of engines that it does not know yet"
    task = asyncio.create_task(successor.decisions.run())
    await asyncio.sleep(3)
    successor.report()
    late = Worker(crew, 2, life=1)
    late.report()
    await asyncio.sleep(2.5)
    assert successor.desired.drained.keys() == late.desired.drained.keys() == {E}
    successor.unsynced = []
    await asyncio.sleep(1)
    successor.desired.drained.clear()
    await asyncio.sleep(5)
    assert not successor.desired.drained, "from then on its own state holds"
    task.cancel()


async def test_a_decision_after_a_restart_is_not_undone_by_what_was_restored() -> None:
    crew, _, other = crew_of_two()
    other.desired.drain(E, "ada")
    successor = Worker(crew, LEAD, life=1)
    successor.report()
    successor.unsynced = ["kubernetes"]
    await successor.decisions.restore()
    task = asyncio.create_task(successor.decisions.run())
    successor.desired.undrain(E)
    await successor.decisions.changed()
    await asyncio.sleep(5)
    assert not successor.desired.drained
    assert not other.desired.drained
    task.cancel()


@pytest.mark.parametrize("state", [b"", b"[]", b'{"removed": 1}'])
def test_decisions_that_cannot_be_read_change_nothing(state: bytes) -> None:
    _, lead, _ = crew_of_two()
    lead.desired.drain(E, "ada")
    with pytest.raises(msgspec.MsgspecError):
        lead.decisions.adopt(state)
    assert (lead.desired.drained.keys(), lead.applied) == ({E}, 0)
