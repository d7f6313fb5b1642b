"""Exchange of proofs of engines' salts, so that one router tries a server for all.

Workers of one machine have their messages for it (``GossipedProofs``), replicas what they leave in Redis
(``replication/stored_proofs``). Only a proof of the same process is taken over. Invariant: ``ask`` and
``tell`` do not raise, and wait for ``TOLD_S_MAX`` at most; who learns nothing tries the server itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from kvatlas.router.fleet.salt_proof import SaltProof, read_told

LEADER_S_MAX: Final = 0.5
"""Longest wait of the leading router for what others know of a server, before it tries it."""
TOLD_S_MAX: Final = 5.0
"""The same of the other routers: meanwhile the leading one tries a new server."""


class SharedProofs(Protocol):
    """Where routers find what others have proven."""

    async def ask(self, engine_id: str, proof: SaltProof) -> None:
        """Take what another router found into ``proof``, which says what process it is of. If ``tries`` is
        as before when this returns, this router is to try the server."""

    async def tell(self, engine_id: str, proof: SaltProof) -> None:
        """Tell the others what was found."""


class GossipedProofs:
    """By messages that all others receive at once. ``known``: this router's own proof of an engine;
    ``leads``: whether it acts for all."""

    def __init__(
        self,
        publish: Callable[[str, bytes], None],
        known: Callable[[str], SaltProof | None],
        leads: Callable[[], bool],
    ) -> None:
        self._publish, self._known, self._leads = publish, known, leads
        self._awaited: dict[str, asyncio.Event] = {}

    async def ask(self, engine_id: str, proof: SaltProof) -> None:
        """Implement ``SharedProofs``: wait for an answer, or for the leading router's outcome."""
        heard = self._awaited[engine_id] = asyncio.Event()
        self._publish(engine_id, proof.told())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEADER_S_MAX if self._leads() else TOLD_S_MAX):
                    await heard.wait()
        finally:
            self._awaited.pop(engine_id, None)

    async def tell(self, engine_id: str, proof: SaltProof) -> None:
        """Implement ``SharedProofs``."""
        self._publish(engine_id, proof.told())

    def hear(self, engine_id: str, told: bytes) -> None:
        """Take in what another router tells or asks. Raises ``ValueError`` if it cannot be read."""
        found, mine = read_told(told), self._known(engine_id)
        if mine is None:
            return
        if not found.tries:
            if mine.tries and mine.started == found.started:
                self._publish(engine_id, mine.told())
        elif mine.hear(found) and (heard := self._awaited.get(engine_id)) is not None:
            heard.set()
