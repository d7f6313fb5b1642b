"""The handshake with a server: log in, identify it, and in a Cluster read the slot map."""

from __future__ import annotations

import re
from typing import Any

import hiredis

from router.replication.redis.connection import IndexUnavailable, Link, Reply, pack
from router.replication.redis.settings import Target
from router.replication.schema.keys import SLOTS

Address = tuple[str, int]
Range = tuple[int, int, Address]
"""First slot, last slot, master."""


class ServerError(IndexUnavailable):
    """The server answered a command with an error; ``reason`` is its first word, such as ``OOM``."""

    def __init__(self, error: BaseException) -> None:
        text = str(error)
        super().__init__(text.split(" ", 1)[0] or "ERR", text)


class ServerLink(Link):
    """A link that knows whom it leads to."""

    cluster = False


async def greet(link: ServerLink, target: Target, timeout_s: float) -> None:
    """Log in, choose the database, learn who answers. Raises ``IndexUnavailable``."""
    hello: list[bytes | str | int] = ["HELLO", 2]
    if target.password is not None:
        hello += ["AUTH", target.username or "default", target.password]
    facts = _pairs(await _ask(link, timeout_s, *hello))
    link.cluster = facts.get("mode") == "cluster"
    if facts.get("role") != "master" and not link.cluster:
        raise IndexUnavailable("READONLY", "the server is a replica")
    if target.db:
        await _ask(link, timeout_s, "SELECT", target.db)
    found = re.search(rb"run_id:(\w+)", await _ask(link, timeout_s, "INFO", "server"))
    if found is None:
        raise IndexUnavailable("ERR", "INFO server tells no run_id")
    link.run_id = found[1].decode()


async def _ask(link: Link, timeout_s: float, *args: bytes | str | int) -> Reply:
    (reply,) = await link.ask(pack(*args), 1, timeout_s)
    if isinstance(reply, hiredis.ReplyError):
        raise ServerError(reply)
    return reply


async def cluster_ranges(link: Link, asked: Address, timeout_s: float) -> tuple[Range, ...]:
    """Which master serves which slots. Raises ``IndexUnavailable`` while any slot is served by nobody."""
    reply = await _ask(link, timeout_s, "CLUSTER", "SLOTS")
    ranges = sorted((first, last, _node(node, asked)) for first, last, node, *_ in reply)
    covered = sum(last - first + 1 for first, last, _ in ranges)
    if covered != SLOTS:
        raise IndexUnavailable("CLUSTERDOWN", f"{SLOTS - covered} slots are served by nobody")
    return tuple(ranges)


def _node(node: list[Any], asked: Address) -> Address:
    host = node[0].decode() if node[0] else ""
    return host or asked[0], int(node[1])


def _pairs(flat: Reply) -> dict[str, str]:
    """A flat reply of names and values; values that are no strings are left out."""
    it = iter(flat)
    return {k.decode(): v.decode() for k, v in zip(it, it, strict=True) if isinstance(v, bytes)}
