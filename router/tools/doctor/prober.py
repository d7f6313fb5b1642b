"""One engine as the probe of ``kvatlas.router.fleet.engine_probe`` sees it from the doctor's machine.

Requests are tokenized and predicted by the serving code. They are sent one at a time, so that prediction,
report and events refer to the same state.
"""

from __future__ import annotations

import asyncio

from kvatlas.router.fleet.engine_probe import Prediction
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.tools.doctor.listener import EventListener


class DoctorsEngine:
    """Implements ``ProbedEngine``."""

    def __init__(
        self,
        engine: EngineAddress,
        model: str,
        scope: FleetResidency,
        reader: PromptReader,
        listener: EventListener | None,
        frontend: Frontend,
    ) -> None:
        self._engine_id = engine.engine_id
        self._model = model
        self._scope = scope
        self._reader = reader
        self._listener = listener
        self._frontend = frontend

    async def predict(self, path: str, body: bytes) -> Prediction:
        """Read a prompt as the router does, and predict its hit."""
        try:
            read = await self._reader.read(
                InboundRequest("POST", path, b"", [], body, self._model), (self._frontend,)
            )
        except ApiError:
            read = None
        if not isinstance(read, Prompt):
            return Prediction(why_unknown="its tokens could not be determined")
        hit = self._scope.predict(read, [self._engine_id])[self._engine_id]
        known = None if hit.mode == "unknown" else hit.hit_tokens
        return Prediction(known, read.num_tokens, hit.mode, hit.why_unknown)

    def events(self) -> int:
        """Return the number of events so far; batches without events are a publisher's heartbeat."""
        return 0 if self._listener is None else self._listener.event_counts.events

    def alignment(self) -> int | None:
        """Return the alignment of its groups."""
        layout = self._scope.engine(self._engine_id).layout
        return None if layout is None else layout.alignment

    async def settle(self) -> None:
        """Run a pending search for the hash seed to its end (a few seconds at most)."""
        residency = self._scope.engine(self._engine_id)
        while residency.searching:
            residency.advance_detection()
            await asyncio.sleep(0)

    async def turn(self) -> bool:
        """Return True: the user has chosen the moment."""
        return True

    def took_s(self) -> None:
        """Return None: the doctor predicts no seconds."""
