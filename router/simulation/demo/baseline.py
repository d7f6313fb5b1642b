"""Baseline: the same requests at the same times under round robin, on virtual engines.

The engines are those of the demo, on a virtual clock (``VirtualEngine``), so the
comparison needs no second run and adds no load. Round robin gets the requests with the times of the real
run: with later answers, its users would have asked later too, so its queueing is slightly underestimated.
"""

from __future__ import annotations

from itertools import cycle

from kvatlas.publisher.simulator.api_protocol import ChatRequest
from kvatlas.publisher.simulator.model import EngineModel
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.settings import EngineSettings, model_length, resolve_groups
from kvatlas.publisher.simulator.virtual_engine import VirtualEngine
from kvatlas.router.simulation.demo.load import ChatOutcome
from kvatlas.router.simulation.demo.table import Tally


class RoundRobinBaseline:
    """A fleet of virtual engines behind round robin."""

    def __init__(self, engines: int, settings: EngineSettings) -> None:
        self._model = EngineModel(settings, model_length(settings, resolve_groups(settings)))
        self._engines = [VirtualEngine(settings) for _ in range(engines)]
        self._turn = cycle(self._engines)
        self._pending: list[tuple[float, SimRequest]] = []
        self._sent: dict[str, tuple[VirtualEngine, SimRequest]] = {}
        self._count = 0

    async def add(self, outcome: ChatOutcome) -> None:
        """Add one request of the real run, in any order; it is sent in the order of its arrival."""
        request = ChatRequest(messages=[dict(m) for m in outcome.messages], max_tokens=outcome.max_tokens)
        prepared = await self._model.prepare_chat(request)
        self._count += 1
        self._pending.append((outcome.at_s, self._model.sim_request(f"baseline-{self._count}", prepared)))

    def advance(self, until_s: float) -> None:
        """Send everything that arrived before ``until_s`` and advance the engines."""
        due = sorted((p for p in self._pending if p[0] <= until_s), key=lambda p: p[0])
        self._pending = [p for p in self._pending if p[0] > until_s]
        for at_s, request in due:
            engine = next(self._turn)
            engine.submit(request, at_s)
            self._sent[request.request_id] = engine, request
        for engine in self._engines:
            engine.advance(until_s)

    def finish(self) -> None:
        """Send the rest and let every engine finish."""
        self.advance(max((at_s for at_s, _ in self._pending), default=0.0))
        for engine in self._engines:
            engine.advance(float("inf"))

    def tally(self) -> Tally:
        """Return hits and first-token times so far."""
        tally = Tally()
        for engine, request in self._sent.values():
            first_s = engine.first_token_s.get(request.request_id)
            if first_s is not None:
                tally.add(len(request.prompt), request.cached_tokens or 0, first_s - request.arrival_s)
        return tally
