"""Lets requests in by their key, and takes the key out of what engines get.

Always true: nothing of a request's body is read before its tenant is known; no key is logged, counted or
answered back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from router.admission.key_file import KeyFile
from router.admission.tenants import Spent, Tenant, TenantRequest, TenantStats
from router.openai.errors import invalid_key

_Fields = list[tuple[bytes, bytes]]
_CREDENTIALS = frozenset((b"authorization", b"x-api-key"))


class KeyStats(msgspec.Struct):
    """Counters for metrics."""

    unknown: int = 0
    """Requests refused with 401: without a key, or with one that is not in the key file."""


class KeyGate:
    """``engine_fields`` are sent to engines instead of a client's credentials; ``forward``: those stay."""

    def __init__(
        self,
        keys: KeyFile,
        *,
        clock: Callable[[], float],
        forward: bool = False,
        engine_fields: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._forward = forward
        self._engine_fields = tuple(engine_fields)
        self._tenants: dict[str, Tenant] = {}
        self.stats = KeyStats()

    def enter(self, fields: _Fields) -> TenantRequest:
        """A request with these header fields. Raises ``ApiError`` (401, 429)."""
        return TenantRequest(self.tenant_of(fields), self._clock)

    def tenant_of(self, fields: _Fields) -> Tenant:
        """Whose key they carry. Raises ``ApiError`` (401)."""
        key = _key(fields)
        name = None if key is None else self._keys.tenant_of(key)
        if name is None:
            self.stats.unknown += 1
            raise invalid_key(given=key is not None)
        return self.account(name)

    def account(self, name: str) -> Tenant:
        """Of this tenant, by the rules that hold now."""
        now, rules = self._clock(), self._keys.rules(name)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, rules, now)
        tenant.follow(rules, now)
        return tenant

    def spent(self) -> dict[str, Spent]:
        """For other workers: what tenants used here since the last call, of those that used any."""
        found = {name: tenant.spent() for name, tenant in self._tenants.items()}
        return {name: spent for name, spent in found.items() if spent is not None}

    def spent_elsewhere(self, worker: int, spent: Mapping[str, Spent]) -> None:
        """What another worker let tenants use counts against their limits here."""
        now = self._clock()
        for name, one in spent.items():
            self.account(name).spent_elsewhere(worker, one, now)

    def forget_worker(self, worker: int) -> None:
        """A worker ended."""
        for tenant in self._tenants.values():
            tenant.forget_worker(worker)

    def for_engines(self, fields: _Fields) -> _Fields:
        """The fields that engines get."""
        if self._forward:
            return fields
        return [*(field for field in fields if field[0] not in _CREDENTIALS), *self._engine_fields]

    def tenants(self) -> dict[str, TenantStats]:
        """By tenant, of those that asked for anything yet."""
        return {name: tenant.stats for name, tenant in self._tenants.items()}


def _key(fields: _Fields) -> bytes | None:
    """``Authorization: Bearer KEY`` (OpenAI), or ``x-api-key: KEY`` (Anthropic)."""
    for name, value in fields:
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return None
