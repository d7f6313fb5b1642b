"""The registry of one scope: epoch, engine slots and generations, patterns, and a description of each engine.

A scope's registry is one hash: if the server loses it, it loses all of it, and the replica that opens the
scope again creates another epoch, in which earlier blocks are not found. Each change draws a new ``version``,
a random number and not a counter, so that equal versions mean equal content even if a failover undid the last
changes. Invariant: a ``ScopeView`` is a consistent snapshot.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.index.base import WORD_BITS, Plane, Slot
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.replication import block_scripts, scripts
from kvatlas.router.replication.codec import codes_max, pattern_name, pattern_planes
from kvatlas.router.replication.keys import EPOCH_BYTES, SCHEMA, ScopeKeys, schema_key
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable

_LOG = structlog.get_logger()

SLOTS_MAX = 4096
_CLUSTER_PARTITIONS = 16
# Bytes shown in an error of a value that is not a schema number.
_SCHEMA_SHOWN_BYTES = 40
_CHECK_NAMESPACE_S = 60.0


class IndexRefused(Exception):  # noqa: N818  # a state of the index, no error in the code
    """This replica must not use the index; ``str()`` gives the reason and the remedy."""


class EpochChanged(IndexUnavailable):
    """The scope has another epoch than the caller knows: everything must be claimed and written again."""

    def __init__(self) -> None:
        super().__init__("epoch", "the registry was recreated")


class LeaseLost(IndexUnavailable):
    """Another replica holds the engine's lease: nothing may be written for it."""

    def __init__(self, engine_id: str) -> None:
        super().__init__("lease", f"the lease of {engine_id} is not held")
        self.engine_id = engine_id


class EngineFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Description of an engine, published by its writer beside the blocks."""

    layout: CacheLayout | None = None
    scheme: HashScheme | None = None
    mode: str = "unknown"
    """``native``, ``learned`` (blocks are written under own keys), or ``unknown``."""
    why_unknown: str = ""
    feed_state: str = "cold"
    missing_batches: int = 0
    stores: tuple[str, ...] = ()
    """Shared stores that it loads from."""


class EngineSlot(NamedTuple):
    """An engine's position in the values of a scope, and its current generation."""

    number: int
    generation: int

    @property
    def slot(self) -> Slot:
        return Slot(*divmod(self.number, WORD_BITS))


class Scope(NamedTuple):
    """Properties that never change within one epoch."""

    epoch: bytes
    partitions: int
    code_bytes: int
    server_identity: str
    """``Client.identity`` of the servers that the scope was written to."""


class ScopeView(NamedTuple):
    """A snapshot of the registry."""

    scope: Scope
    version: bytes | None
    slots: dict[str, EngineSlot]
    facts: dict[str, EngineFacts]
    patterns: dict[int, tuple[Plane, ...]]
    retired_slots: int


class Registry:
    """One scope's registry, over one client."""

    def __init__(self, client: Client, model: str) -> None:
        self.client = client
        self.model = model
        self.keys = ScopeKeys(client.settings.namespace, model)
        self._schema_checked, self._check_again_at = "", 0.0

    async def open(self) -> Scope:
        """Open the scope, and create it if there is none. Raises ``IndexRefused`` for another schema."""
        settings, identity = self.client.settings, self.client.identity
        await self._check_namespace(identity)
        default = _CLUSTER_PARTITIONS if self.client.cluster else 1
        reply = await self.client.run(
            scripts.OPEN,
            [self.keys.scope],
            SCHEMA,
            settings.partitions or default,
            settings.code_bytes,
            _new_epoch(),
            identity,
            _random_version(),
            self._control_ttl_ms,
        )
        _refuse_other_schema(reply[0], settings.namespace)
        return Scope(reply[3], int(reply[1]), int(reply[2]), reply[4].decode())

    async def replace_servers(self, scope: Scope) -> None:
        """Invalidate everything written before: the servers are not those the scope was written to."""
        _LOG.warning("index servers changed; residency is written again", model=self.model)
        identity = self.client.identity
        await self.client.run(
            scripts.REPLACE_SERVERS,
            [self.keys.scope],
            SCHEMA,
            scope.epoch,
            scope.server_identity,
            _new_epoch(),
            identity,
            _random_version(),
            self._control_ttl_ms,
        )

    async def check(self) -> None:
        """Check the schema of this namespace and scope; changes nothing. Raises ``IndexRefused``."""
        found = await self.client.command("GET", schema_key(self.client.settings.namespace))
        _refuse_other_schema(found, self.client.settings.namespace)
        await self.fetch()

    async def fetch(self) -> ScopeView | None:
        """A snapshot of the registry; None if the scope does not exist."""
        return parse_view(await self.client.command("HGETALL", self.keys.scope))

    async def fence(self, scope: Scope, engine_id: str, token: int) -> None:
        """Fence off writers with older tokens in every partition. Raises ``LeaseLost`` for a newer one."""
        for partition in range(scope.partitions):
            key = self.keys.fence(partition, scope.partitions)
            stands = await self.client.run(block_scripts.FENCE, [key], engine_id, token, self._control_ttl_ms)
            if stands != token:
                raise LeaseLost(engine_id)

    async def claim(self, scope: Scope, engine_id: str, token: int) -> EngineSlot:
        """Give the engine a new generation, which invalidates all its blocks, in O(1).

        Raises ``LeaseLost`` or ``EpochChanged``.
        """
        reply = await self.client.run(
            scripts.CLAIM,
            [self.keys.scope, self.keys.leases],
            SCHEMA,
            scope.epoch,
            engine_id,
            token,
            _random_version(),
            SLOTS_MAX,
            _new_epoch(),
            self._control_ttl_ms,
            int(self.client.settings.lease_s * 1000),
        )
        _raise_for(reply[0], engine_id)
        return EngineSlot(int(reply[1]), int(reply[2]))

    async def describe(self, scope: Scope, engine_id: str, token: int, facts: EngineFacts) -> None:
        """Publish an engine's description. Raises ``LeaseLost`` or ``EpochChanged``."""
        blob = msgspec.msgpack.encode(facts)
        keys = [self.keys.scope, self.keys.leases]
        reply = await self.client.run(
            scripts.DESCRIBE, keys, scope.epoch, engine_id, token, blob, _random_version()
        )
        _raise_for(reply, engine_id)

    async def codes(self, scope: Scope, patterns: Sequence[Sequence[Plane]]) -> list[int]:
        """Return the code of each pattern, allocated on first use; 0 if none is left."""
        names = [pattern_name(planes) for planes in patterns]
        limit = codes_max(scope.code_bytes)
        reply = await self.client.run(
            scripts.CODES, [self.keys.scope], scope.epoch, _random_version(), limit, *names
        )
        _raise_for(reply[0], "")
        return [int(code) for code in reply[1:]]

    async def invalidate(self, engine_id: str, token: int) -> None:
        """Invalidate all blocks of this engine until it is claimed again; works on a full server too.

        Raises ``LeaseLost``.
        """
        keys = [self.keys.scope, self.keys.leases]
        _raise_for(await self.client.run(scripts.INVALIDATE, keys, engine_id, token), engine_id)

    async def retire(self, scope: Scope, engine_id: str, token: int | None, idle_s: float = 0.0) -> bool:
        """Remove an engine that left the fleet and free its slot.

        Without a token only if its lease expired ``idle_s`` ago. Returns False if the lease forbids it.
        Raises ``EpochChanged``.
        """
        reply = await self.client.run(
            scripts.RETIRE,
            [self.keys.scope, self.keys.leases],
            scope.epoch,
            engine_id,
            "" if token is None else token,
            _random_version(),
            int(idle_s * 1000),
        )
        if reply == b"EPOCH":
            raise EpochChanged
        return bool(reply == b"OK")

    @property
    def _control_ttl_ms(self) -> int:
        return int(self.client.settings.control_ttl_s * 1000)

    async def _check_namespace(self, identity: str) -> None:
        """Check the schema of the namespace, once a minute and after the servers changed; also renews the
        key.

        Raises ``IndexRefused`` if the namespace has another schema.
        """
        now = asyncio.get_running_loop().time()
        if self._schema_checked == identity and now < self._check_again_at:
            return
        key, ttl = schema_key(self.client.settings.namespace), self._control_ttl_ms
        await self.client.command("SET", key, SCHEMA, "NX", "PX", ttl)
        _refuse_other_schema(await self.client.command("GET", key), self.client.settings.namespace)
        await self.client.command("PEXPIRE", key, ttl)
        self._schema_checked, self._check_again_at = identity, now + _CHECK_NAMESPACE_S


def parse_view(fields: Mapping[bytes, bytes]) -> ScopeView | None:
    """Parse the registry from the fields of its hash; None if the scope does not exist (completely). Raises
    ``IndexRefused`` for another schema, and for a field that no replica wrote."""
    if not {b"epoch", b"p", b"w", b"home", b"schema", b"used"} <= fields.keys():
        return None
    _refuse_other_schema(fields[b"schema"], "this namespace")
    slots: dict[str, EngineSlot] = {}
    facts: dict[str, EngineFacts] = {}
    patterns: dict[int, tuple[Plane, ...]] = {}
    name = b"p, w or home"
    try:
        scope = Scope(fields[b"epoch"], int(fields[b"p"]), int(fields[b"w"]), fields[b"home"].decode())
        for name, value in fields.items():
            match name[:2]:
                case b"s:":
                    number, _, generation = value.partition(b":")
                    slots[name[2:].decode()] = EngineSlot(int(number), int(generation))
                case b"e:":
                    facts[name[2:].decode()] = msgspec.msgpack.decode(value, type=EngineFacts)
                case b"p:":
                    patterns[int(value)] = pattern_planes(name[2:])
    except (ValueError, msgspec.MsgspecError) as error:
        shown = name[:_SCHEMA_SHOWN_BYTES].decode(errors="replace")
        raise IndexRefused(
            f"the registry's field {shown!r} cannot be read ({error}): another program writes to this "
            "namespace; choose one of its own, or delete the keys that begin with it"
        ) from None
    return ScopeView(scope, fields.get(b"v"), slots, facts, patterns, fields[b"used"].count(b"x"))


def _refuse_other_schema(found: bytes | None, namespace: str) -> None:
    if found is not None and found != str(SCHEMA).encode():
        shown = found[:_SCHEMA_SHOWN_BYTES].decode(errors="replace")
        raise IndexRefused(
            f"the index in namespace {namespace!r} has schema {shown}, this replica "
            f"writes schema {SCHEMA}: run one version of kvatlas per namespace, or choose another namespace"
        )


def _raise_for(word: bytes, engine_id: str) -> None:
    if word == b"EPOCH":
        raise EpochChanged
    if word == b"LEASE":
        raise LeaseLost(engine_id)


def _random_version() -> bytes:
    return secrets.token_bytes(8)


def _new_epoch() -> bytes:
    return secrets.token_bytes(EPOCH_BYTES)
