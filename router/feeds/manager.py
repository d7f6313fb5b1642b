"""The feeds of all engines that publish events; each runs until it is stopped.

A feed that fails is logged and restarted from nothing; it never ends the router. Invariant: after ``stop`` no
batch of the old feed is applied, so an engine may be followed again at once, at another address or for
another model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from kvatlas.router.feeds.base import FeedSettings, FeedSink, FeedStats
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.fleet.engines import EngineAddress

_log = structlog.get_logger()
_RESTART_S = 1.0


class FeedControl(Protocol):
    """Starts and stops feeds: on this router, or on the replica that holds the lease."""

    def follows(self, engine: EngineAddress, model: str) -> bool:
        """Whether this engine is followed, at these addresses and for this model."""

    def follow(self, engine: EngineAddress, model: str, tasks: asyncio.TaskGroup) -> None:
        """Start following an engine that is not followed."""

    def stop(self, engine_id: str) -> None:
        """Stop following; nothing happens if not followed."""

    def stop_all(self) -> None:
        """Stop following every engine."""


class FeedManager:
    """Runs at most one feed per engine id. ``on_change`` is called with the engine id and the live stats of a
    feed that starts or whose state has changed, or None for one that stops."""

    def __init__(
        self,
        sink: FeedSink,
        *,
        clock: Callable[[], float],
        settings: FeedSettings,
        on_change: Callable[[str, FeedStats | None], None] = lambda engine_id, stats: None,
    ) -> None:
        self._sink = sink
        self._on_change = on_change
        self._clock = clock
        self._settings = settings
        self._followed: dict[str, _Followed] = {}
        self._logged_types: set[str] = set()

    @property
    def stats(self) -> dict[str, FeedStats]:
        """Return the current feeds' stats, by engine id."""
        return {e: one.feed.stats for e, one in self._followed.items() if one.feed is not None}

    def follows(self, engine: EngineAddress, model: str) -> bool:
        """Whether this engine is followed, at these addresses and for this model."""
        followed = self._followed.get(engine.engine_id)
        return followed is not None and (followed.engine, followed.model) == (engine, model)

    def follow(self, engine: EngineAddress, model: str, tasks: asyncio.TaskGroup) -> None:
        """Start to follow an engine that is not followed. Its feed runs in ``tasks``."""
        followed = _Followed(engine, model)
        self._followed[engine.engine_id] = followed
        followed.task = tasks.create_task(self._run(followed), name=f"feed {engine.engine_id}")

    def stop(self, engine_id: str) -> None:
        """Stop following and forget the engine's state. Does nothing if it is not followed."""
        followed = self._followed.pop(engine_id, None)
        if followed is None:
            return
        self._on_change(engine_id, None)
        if followed.feed is not None:
            followed.feed.close()
        if followed.task is not None:
            followed.task.cancel()

    def distrust(self, engine_id: str, reason: str) -> None:
        """Fetch the engine's residency again: it was found to be wrong."""
        followed = self._followed.get(engine_id)
        if followed is not None and followed.feed is not None:
            followed.feed.distrust(reason)

    def suspect(self, engine_id: str) -> None:
        """Handle an engine that is down or has restarted."""
        followed = self._followed.get(engine_id)
        if followed is not None and followed.feed is not None:
            followed.feed.suspect()

    def reconnect(self, engine_id: str) -> None:
        """Handle an engine that has restarted without an end of its connections."""
        followed = self._followed.get(engine_id)
        if followed is not None and followed.feed is not None:
            followed.feed.reconnect()

    def computed(self, engine_id: str, since: float) -> None:
        """Handle a response that shows that the engine stored blocks since then (clock seconds)."""
        followed = self._followed.get(engine_id)
        if followed is not None and followed.feed is not None:
            followed.feed.computed(since)

    def stop_all(self) -> None:
        """Stop following every engine."""
        for engine_id in list(self._followed):
            self.stop(engine_id)

    def _feed_changed(self, followed: _Followed) -> None:
        """Pass on a new state; nothing more is passed on of a feed that was stopped."""
        engine_id = followed.engine.engine_id
        if followed.feed is not None and self._followed.get(engine_id) is followed:
            self._on_change(engine_id, followed.feed.stats)

    async def _run(self, followed: _Followed) -> None:
        engine = followed.engine
        if engine.events is None:
            raise AssertionError("an engine without events has no feed")
        while True:
            feed = followed.feed = Feed(
                engine.engine_id,
                engine.events,
                engine.replay,
                engine.topic,
                self._sink,
                clock=self._clock,
                settings=self._settings,
                snapshot_endpoint=engine.snapshot,
                logged_types=self._logged_types,
                changed=lambda: self._feed_changed(followed),
            )
            self._on_change(engine.engine_id, feed.stats)
            try:
                await feed.run()
            except Exception:  # noqa: BLE001  # the other feeds and requests must continue
                _log.exception("feed failed, restarting it", engine=engine.engine_id)
            feed.close()
            await asyncio.sleep(_RESTART_S)


class _Followed:
    """One followed engine, its feed and its task."""

    def __init__(self, engine: EngineAddress, model: str) -> None:
        self.engine = engine
        self.model = model
        self.feed: Feed | None = None
        self.task: asyncio.Task[None] | None = None
