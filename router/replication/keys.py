"""Keys of the shared index.

Every key starts with the namespace. The keys of a scope (one base model) carry its name in a hash tag, so
that a Cluster keeps them together. A block's key is ``namespace:`` [``{tag}`` of its partition in a
Cluster] + 6 bytes of the scope's *epoch* + 8 bytes of the block hash. The epoch is a random number drawn
whenever a scope's registry is created, and so stands for namespace, schema, model and this one registry:
blocks written before the registry was lost are never found by a later one. The hash itself is specific to
the hash scheme. Keys of up to 22 bytes cost one 24-byte allocation; the default namespace stays within
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from kvatlas.router.index.base import Words

# Version of keys and values; another version in the same namespace is refused.
SCHEMA = 1

EPOCH_BYTES = 6
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class ScopeKeys:
    """Keys of one scope: registry, leases, and the messages of replicas (load, prompts in flight,
    members).
    """

    def __init__(self, namespace: str, model: str) -> None:
        self.namespace = namespace
        stem = f"{namespace}:{{{quote(model, safe='/:@._~-+')}}}:"
        self.scope = f"{stem}scope".encode()
        self.leases = f"{stem}leases".encode()
        self.load = f"{stem}load".encode()
        self.inflight = f"{stem}flights".encode()
        self.replicas = f"{stem}replicas".encode()
        self._model = quote(model, safe="/:@._~-+")

    def fence(self, partition: int, partitions: int) -> bytes:
        """Key of the writers' tokens and sequence numbers in one partition."""
        return f"{self.namespace}:{tag(partition, partitions)}fence:{self._model}".encode()

    def prefix(self, epoch: bytes, partition: int, partitions: int) -> bytes:
        """Return a block's key up to its hash."""
        return f"{self.namespace}:{tag(partition, partitions)}".encode() + epoch


def schema_key(namespace: str) -> bytes:
    """Key of a namespace's schema number; must never change."""
    return f"{namespace}:schema".encode()


def limits_key(namespace: str) -> bytes:
    """Key of the tenants' usage reported by all replicas."""
    return f"{namespace}:limits".encode()


def proof_key(namespace: str, of: str) -> bytes:
    """Key of what is proven of an engine's salts."""
    return f"{namespace}:salts:{of}".encode()


@cache
def tag(partition: int, partitions: int) -> str:
    """Return the hash tag of a partition, chosen so that partitions spread evenly over the slots; "" for
    a single one.
    """
    if partitions == 1:
        return ""
    width = SLOTS // partitions
    for first in _LETTERS:
        for second in _LETTERS:
            if key_slot((first + second).encode()) // width == partition:
                return f"{{{first}{second}}}"
    raise AssertionError("1296 tags hit every one of 64 ranges")


def partition_of(hashes: Words, partitions: int) -> npt.NDArray[np.intp]:
    return (hashes & np.uint64(partitions - 1)).astype(np.intp)


def mget(prefix: bytes, hashes: Words) -> bytes:
    """Pack the MGET command of these blocks."""
    head = b"$%d\r\n" % (len(prefix) + 8) + prefix
    width = len(head) + 10
    packed = np.empty((len(hashes), width), np.uint8)
    packed[:, : len(head)] = np.frombuffer(head, np.uint8)
    packed[:, len(head) : len(head) + 8] = hashes.astype("<u8").view(np.uint8).reshape(-1, 8)
    packed[:, -2:] = (13, 10)
    return b"*%d\r\n$4\r\nMGET\r\n" % (len(hashes) + 1) + packed.tobytes()


def as_words(hashes: Sequence[int]) -> tuple[Words, npt.NDArray[np.bool_] | None]:
    """Return the hashes as 64-bit words, and which of them are not negative (None if all are)."""
    if not hashes or min(hashes) >= 0:
        return np.array(hashes, np.uint64), None
    real = np.array([value >= 0 for value in hashes], np.bool_)
    return np.array([max(value, 0) for value in hashes], np.uint64), real
