"""Lets requests in by their key, and takes the key out of what engines get.

Always true: nothing of a request's body is read before its tenant is known; no key is logged, counted or
answered back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from router.admission.key_file import KeyFile
from router.admission.tenants import Spent, Tenant, TenantRequest, TenantStats, Use
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
        self.configure(keys, forward=forward)
        self._clock = clock
        self._engine_fields = tuple(engine_fields)
        self._tenants: dict[str, Tenant] = {}
        self.stats = KeyStats()

    def configure(self, keys: KeyFile, *, forward: bool) -> None:
        """The keys of this file count from now on; what tenants of the same name used stays used."""
        self.keys = keys
        self._forward = forward

    def enter(self, fields: _Fields) -> TenantRequest:
        """A request with these header fields. Raises ``ApiError`` (401, 429)."""
        return TenantRequest(self.tenant_of(fields), self._clock)

    def tenant_of(self, fields: _Fields) -> Tenant:
        """Whose key they carry. Raises ``ApiError`` (401)."""
        key = _key(fields)
        name = None if key is None else self.keys.tenant_of(key)
        if name is None:
            self.stats.unknown += 1
            raise invalid_key(given=key is not None)
        return self.account(name)

    def account(self, name: str) -> Tenant:
        """Of this tenant, by the rules that hold now."""
        now, rules = self._clock(), self.keys.rules(name)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, rules, now)
        tenant.follow(rules, now)
        return tenant

    def spent(self) -> dict[str, Spent]:
        """For other workers: what tenants used here since the last call, of those that used any."""
        found = {name: tenant.spent() for name, tenant in self._tenants.items()}
        return {name: spent for name, spent in found.items() if spent is not None}

    def uses(self) -> dict[str, Use]:
        """For other replicas: what tenants with limits have used."""
        now = self._clock()
        found = {name: tenant.use(now) for name, tenant in self._tenants.items()}
        return {name: use for name, use in found.items() if use is not None}

    def level(self, name: str, use: Use) -> None:
        """No more is left to a tenant here than a replica says that it hears for the first time, or again."""
        if name in self.keys.table.tenants:
            self.account(name).level(use, self._clock())

    def spent_elsewhere(self, other: Hashable, spent: Mapping[str, Spent]) -> None:
        """What another worker or replica let tenants use counts against their limits here."""
        now = self._clock()
        for name, one in spent.items():
            if name in self.keys.table.tenants:
                self.account(name).spent_elsewhere(other, one, now)

    def forget_other(self, other: Hashable) -> None:
        """A worker or replica ended."""
        for tenant in self._tenants.values():
            tenant.forget_other(other)

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
