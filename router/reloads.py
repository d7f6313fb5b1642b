"""A new configuration at SIGHUP: read, checked and applied while serving.

``decide`` reads and checks, in the process that reads the file (the parent, if there are workers);
``Reloads`` applies, in each serving process. Keys and certificates are read again too, as if their files had
changed. Invariants: an unusable configuration changes nothing and is logged; changes that need a restart are
logged and not applied; reloads do not overlap.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from kvatlas.router.admission.key_file import KeyFile, KeyFileError
from kvatlas.router.api.metrics_page import ReloadStats
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.reload import Change, changes
from kvatlas.router.config.schema import Config
from kvatlas.router.placement.policies import policy
from kvatlas.router.prompts.model_dir import ModelDirError
from kvatlas.router.proxy.aliases import Aliases
from kvatlas.router.startup_check import check_engines

_log = structlog.get_logger()
_PENDING_NAME = "config"
Decide = Callable[[Config], "Decided"]


class Decided(msgspec.Struct, frozen=True):
    """Result of one reload. ``config``: the new configuration; None: the old one stays in effect."""

    outcome: str
    config: Config | None = None
    waiting: int = 0


def decide(running: Config, load: Callable[[], Config]) -> Decided:
    """Read the configuration again and log the result."""
    try:
        change = changes(running, load())
        check_engines(change.config)
        policy(change.config.policy.policy)
    except (ConfigError, ValueError) as error:
        return refused(error)
    _tell(change)
    if not change.taken:
        return Decided("unchanged", None, len(change.waiting))
    return Decided("applied", change.config, len(change.waiting))


def refused(error: Exception) -> Decided:
    """Log an unusable configuration."""
    _log.error("configuration not reloaded, the old one stays", problem=str(error))
    return Decided("refused")


def _tell(change: Change) -> None:
    _log.info("configuration read again", changed=list(change.taken))
    if change.waiting:
        _log.warning("settings that need a restart were not changed", keys=list(change.waiting))


def hand_over(folder: Path, decided: Decided) -> None:
    """Save the decision for the workers, which share this folder."""
    part = folder / f"{_PENDING_NAME}.part"
    part.write_bytes(msgspec.msgpack.encode(decided))
    part.replace(folder / _PENDING_NAME)


def inherited(folder: Path) -> Decided:
    """Return the parent's last decision."""
    return msgspec.msgpack.decode((folder / _PENDING_NAME).read_bytes(), type=Decided)


def hold_back() -> None:
    """Defer SIGHUP until ``Reloads`` handles it; by default it would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


class Reloads:
    """Reloads of one serving process; ``on_log`` is called with a level and a format."""

    def __init__(self, router: Router, decide: Decide, *, on_log: Callable[[str, str], None]) -> None:
        self._router = router
        self._decide = decide
        self._on_log = on_log
        self._asked = asyncio.Event()
        self.stats = ReloadStats()

    async def run(self) -> None:
        """Reload at each SIGHUP, until cancelled. Call it in the main thread."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self.once()
        finally:
            hold_back()  # the process is already ending
            loop.remove_signal_handler(signal.SIGHUP)

    async def once(self) -> None:
        """Reload once."""
        try:
            running = self._router.config
            decided = await asyncio.to_thread(self._decide, running)
            if decided.config not in (None, running):
                await apply(self._router, decided.config)
                self._on_log(decided.config.server.log_level, decided.config.server.log_format)
        except (KeyFileError, ModelDirError) as error:
            decided = refused(error)
        except Exception as error:  # noqa: BLE001  # the router continues after any error
            decided = refused(error)
            _log.exception("fault in a reload")
        self._renew()
        self.stats.reloads[decided.outcome] += 1
        if decided.outcome != "refused":
            self.stats.waiting = decided.waiting
        _log.info("configuration reload done", outcome=decided.outcome, pid=os.getpid())

    def _renew(self) -> None:
        """Read certificates and keys again."""
        self._router.certificates.reload_changed()
        if self._router.gate is not None:
            self._router.gate.keys.reload()


def reloads_of(
    router: Router, decide: Decide, *, on_log: Callable[[str, str], None], counts: bool = True
) -> Reloads:
    """Make and install the reloads of a router; ``counts``: this process counts them (of workers, the
    lead)."""
    made = Reloads(router, decide, on_log=on_log)
    if counts:
        router.sources.reloads = made.stats
    router.works.append(made.run)
    return made


async def apply(router: Router, config: Config) -> None:
    """Apply everything that ``LIVE`` names. Raises ``KeyFileError`` or ``ModelDirError`` before any
    change."""
    before = router.config
    keys, gate = config.keys, router.gate
    file = None if gate is None else gate.keys
    if file is not None and keys.file is not None and keys.file != before.keys.file:
        file = KeyFile(Path(keys.file), clock=router.clock)
    aliases = Aliases.from_shares(config.alias_shares())
    if config.models != before.models:
        await router.reader.set_models(router.lifecycle.prompts_of(config))
    # From here on nothing fails and nothing waits.
    if gate is not None and file is not None:
        priorities = keys.engine_priorities and not config.policy.engine_priority
        gate.configure(file, forward=keys.forward, engine_priorities=priorities)
    router.aliases = router.sources.aliases = aliases
    server = config.server
    router.planner.configure(
        config.policy,
        config.queue,
        config.pd,
        config.pull,
        expose_decision=server.expose_decision,
        check_every=server.check_every,
    )
    claims = router.planner.reads_claims
    router.proxy.configure(
        config.proxy,
        config.pd,
        aliases,
        claims=claims,
        targets=config.policy.targets,
        silence_s=config.listen.keepalive_comment_s,
    )
    router.proxy.requests.log = server.log_requests
    if config.listen != before.listen:
        router.on_listen(config.listen)
    if router.picker is not None:
        router.picker.configure(config.proxy, config.listen)
    if router.poller is not None:
        router.poller.configure(config.fleet)
        router.poller.versions = config.pull.enabled
        router.poller.versions_once = config.proxy.continue_streams
    router.take(config)
