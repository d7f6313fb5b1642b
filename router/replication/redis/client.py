"""The servers behind a URL, and a live connection to each that is needed.

``Client`` finds the masters (one server, Sentinel's master, or every master of a Cluster), keeps one ``Link``
to each, reconnects with back-off in a task of its own, and routes commands by key. It never retries a
command: callers know what is safe.
``identity`` names the servers by their run ids and the slots they serve. It differs after any restart or
failover, which is how writers and readers notice that what they wrote or believed may be lost: a server that
came back with its data may lack the last removals.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import hiredis
import structlog

from router.replication.redis.connection import IndexUnavailable, Link, Reply, pack, within
from router.replication.redis.handshake import Address, Range, ServerError, ServerLink, cluster_ranges, greet
from router.replication.redis.settings import SettingsError, SharedSettings, parse_url
from router.replication.schema.keys import SLOTS, key_slot
from router.replication.schema.scripts import Script

_LOG = structlog.get_logger()
_BACKOFF_S, _BACKOFF_S_MAX = 0.05, 1.0
_LOOK_AGAIN_S = 5.0
"""How often Sentinel, or a Cluster named as one, is asked for its masters though nothing failed."""
_STALLED_S = 5.0
"""A connection whose oldest question has waited so long is replaced."""


class _Topology(NamedTuple):
    cluster: bool
    ranges: tuple[Range, ...]
    """(first slot, last slot, master); one range for one server."""


class Client:
    """Connections of one user of the shared index; a writer and a reader have one each, so that a reader's
    questions never wait behind a writer's batches."""

    def __init__(self, settings: SharedSettings) -> None:
        self.settings = settings
        self._target = parse_url(settings.url)
        self._tls = self._target.tls_context()
        self._topology = _Topology(False, ())
        self._links: dict[Address, Link] = {}
        self._identity: str | None = None
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._look_again_s = _LOOK_AGAIN_S if self._target.kind != "server" else None
        self.last_error = ""
        self.reconnects = 0

    async def start(self, wait_s: float = 0.0) -> bool:
        """Begin to connect; True if everything is connected within ``wait_s``."""
        if self._task is None:
            self._task = asyncio.create_task(self._maintain())
        try:
            await asyncio.wait_for(self._ready.wait(), max(wait_s, 1e-3))
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close every connection."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for link in self._links.values():
            link.abort()
        self._links.clear()
        self._identity = None
        await asyncio.sleep(0)

    @property
    def cluster(self) -> bool:
        """Whether the servers form a Cluster. Known once connected."""
        return self._topology.cluster

    @property
    def identity(self) -> str:
        """Names this life of these servers. Raises ``IndexUnavailable`` while any is not connected."""
        if self._identity is None:
            raise IndexUnavailable("connection", self.last_error)
        return self._identity

    def masters(self) -> list[Link]:
        """The links to every master; raises ``IndexUnavailable`` while any is missing."""
        return [self._link(address) for address in dict.fromkeys(r[2] for r in self._topology.ranges)]

    def link(self, key: bytes) -> Link:
        """The link to a key's master. Raises ``IndexUnavailable`` while there is none."""
        ranges = self._topology.ranges
        if len(ranges) == 1:
            return self._link(ranges[0][2])
        slot = key_slot(key)
        for first, last, address in ranges:
            if first <= slot <= last:
                return self._link(address)
        raise IndexUnavailable("connection", self.last_error or "not connected yet")

    def _link(self, address: Address) -> Link:
        link = self._links.get(address)
        if link is None or not link.open:
            self._wake.set()
            raise IndexUnavailable("connection", self.last_error or "not connected")
        if link.waited_s > _STALLED_S:
            link.abort()
        return link

    async def command(self, *args: bytes | str | int, key: bytes | None = None) -> Reply:
        """One command, routed by ``key`` or else by its first argument. Raises ``IndexUnavailable``."""
        where = key if key is not None else args[1]
        if not isinstance(where, bytes):
            raise TypeError(f"{args[0]!r}: a command is routed by a key in bytes")
        (reply,) = await self.link(where).ask(pack(*args), 1, self.settings.write_timeout_s)
        return self.checked(reply)

    def submit(
        self, script: Script, keys: Sequence[bytes], *args: bytes | str | int
    ) -> asyncio.Future[list[Reply]]:
        """Put one script on its way to the master of its keys (all of one tag), in the order of calls.

        Its reply may be the error ``NOSCRIPT``: the server lost its scripts; the next call sends the source.
        """
        link = self.link(keys[0])
        known = script.sha in link.loaded
        link.loaded.add(script.sha)
        verb, body = ("EVALSHA", script.sha) if known else ("EVAL", script.source)
        return link.send(pack(verb, body, len(keys), *keys, *args), 1)

    async def outcome(self, script: Script, future: asyncio.Future[list[Reply]]) -> Reply:
        """The reply to a submitted script. Raises ``IndexUnavailable``, ``NOSCRIPT`` included."""
        (reply,) = await within(future, self.settings.write_timeout_s)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
            for link in self._links.values():
                link.loaded.discard(script.sha)
        return self.checked(reply)

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | str | int) -> Reply:
        """One script on the master of its keys, with its reply. Raises ``IndexUnavailable``."""
        try:
            return await self.outcome(script, self.submit(script, keys, *args))
        except ServerError as error:
            if error.reason != "NOSCRIPT":
                raise
        return await self.outcome(script, self.submit(script, keys, *args))

    def checked(self, reply: Reply) -> Reply:
        """The reply, unless it is an error: then ``ServerError``, and a fresh look at the servers if it says
        that they have changed."""
        if isinstance(reply, hiredis.ReplyError):
            error = ServerError(reply)
            if error.reason == "READONLY":  # a master no more: greet whoever answers there anew
                for link in self._links.values():
                    link.abort()
            if error.reason in {"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN"}:
                self.refresh()
            raise error
        return reply

    def refresh(self) -> None:
        """Look at the topology again soon."""
        self._identity = None
        self._wake.set()

    async def _maintain(self) -> None:
        pause = _BACKOFF_S
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(self.settings.connect_timeout_s * 4):
                    await self._connect_all()
            except (OSError, TimeoutError, IndexUnavailable, SettingsError, ValueError) as error:
                if not self.last_error:
                    _LOG.warning("shared index not reachable", index=repr(self._target), error=str(error))
                self.last_error = str(error) or type(error).__name__
                self._ready.clear()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _BACKOFF_S_MAX)
                continue
            if self.last_error:
                _LOG.info("shared index reachable again", index=repr(self._target))
            self.last_error, pause = "", _BACKOFF_S
            self._ready.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._look_again_s)

    async def _connect_all(self) -> None:
        """Find the masters and connect to those that are not connected. The links that are stay."""
        topology = await self._find_masters()
        wanted = {address for _, _, address in topology.ranges}
        for address in [a for a in self._links if a not in wanted]:
            self._links.pop(address).abort()
        self._topology = topology
        failure: Exception | None = None
        for address in sorted(wanted):
            try:
                await self._connect(address)
            except (OSError, TimeoutError, IndexUnavailable) as error:
                failure = error  # the others may still serve their part
        if failure is not None:
            raise failure
        if not all(link.open for link in self._links.values()):
            raise IndexUnavailable("connection", "lost")
        text = ",".join(f"{first}-{last}={self._links[a].run_id}" for first, last, a in topology.ranges)
        self._identity = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    async def _find_masters(self) -> _Topology:
        failure: Exception = IndexUnavailable("connection", "no address")
        sentinel = self._target.kind == "sentinel"
        known = [] if sentinel else [a for a, link in self._links.items() if link.open]
        for address in dict.fromkeys((*known, *self._target.addresses)):
            try:
                if sentinel:
                    return _Topology(False, ((0, SLOTS - 1, await self._ask_sentinel(address)),))
                link = await self._connect(address)
                if not link.cluster:
                    return _Topology(False, ((0, SLOTS - 1, address),))
                return _Topology(True, await cluster_ranges(link, address, self.settings.connect_timeout_s))
            except (OSError, TimeoutError, IndexUnavailable) as error:
                failure = error
        raise failure

    async def _ask_sentinel(self, address: Address) -> Address:
        link = await self._open(address)
        try:
            query = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._target.service)
            (reply,) = await link.ask(query, 1, self.settings.connect_timeout_s)
        finally:
            link.abort()
        if not isinstance(reply, list):
            raise IndexUnavailable("sentinel", f"knows no master named {self._target.service!r}")
        return reply[0].decode(), int(reply[1])

    async def _connect(self, address: Address) -> ServerLink:
        link = self._links.get(address)
        if isinstance(link, ServerLink) and link.open:
            return link
        link = await self._open(address)
        try:
            await greet(link, self._target, self.settings.connect_timeout_s)
        except BaseException:
            link.abort()
            raise
        self._identity = None  # whoever answers here may be another server than before
        self._links[address] = link
        self.reconnects += 1
        return link

    async def _open(self, address: Address) -> ServerLink:
        loop = asyncio.get_running_loop()
        name = address[0] if self._tls is not None else None
        async with asyncio.timeout(self.settings.connect_timeout_s):
            _, link = await loop.create_connection(
                lambda: ServerLink(self._lost), *address, ssl=self._tls, server_hostname=name
            )
        return link

    def _lost(self) -> None:
        """A connection ended: of consequence if it is one of those in use."""
        if not all(link.open for link in self._links.values()):
            self.refresh()


def connect(settings: SharedSettings) -> Client:
    """A client for these settings, not yet started. Raises ``SettingsError`` for unreadable TLS files."""
    return Client(settings)
