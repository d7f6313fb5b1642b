"""Admit requests by their key, take the key out of what engines get, and isolate tenants' cached prompts.

Invariants: nothing of a request's body is read before its tenant is known; no key is logged, counted or
answered back.

vLLM hashes ``cache_salt`` into the first block of a prompt, so prompts with different salts share no block
(vllm/v1/core/kv_cache_utils.py, ``generate_block_hash_extra_keys``, 0.32). A client must not choose the salt
that separates it from others: it is an HMAC-SHA256 under a secret that only routers know.

Invariants: the secret and the salts are in no log, metric, trace or answer; a secret that cannot be read at
the start ends it, one that cannot be read later leaves the last one in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import islice

from kvatlas.router.admission.isolation import Isolation, SharedSecret
from kvatlas.router.admission.key_file import KeyFile, KeyStats
from kvatlas.router.admission.others_use import Use
from kvatlas.router.admission.tenants import Tenant, TenantRequest, TenantStats
from kvatlas.router.openai.errors import invalid_key
from kvatlas.router.pd.settings import RANK

_Fields = list[tuple[bytes, bytes]]
_NOT_FOR_ENGINES = frozenset((b"authorization", b"x-api-key", RANK))


class KeyGate:
    """``engine_fields`` are sent to engines instead of a client's credentials; ``forward``: those stay."""

    def __init__(
        self,
        keys: KeyFile,
        *,
        clock: Callable[[], float],
        forward: bool = False,
        engine_priorities: bool = False,
        engine_fields: Sequence[tuple[bytes, bytes]] = (),
        stats: KeyStats | None = None,
        isolation: Isolation | None = None,
        secret: SharedSecret | None = None,
    ) -> None:
        self.configure(keys, forward=forward, engine_priorities=engine_priorities)
        self.isolation = isolation
        self._secret = secret
        self._clock = clock
        self._engine_fields = tuple(engine_fields)
        self._tenants: dict[str, Tenant] = {}
        self._changed: dict[str, None] = {}
        self.stats = stats or KeyStats()

    def configure(self, keys: KeyFile, *, forward: bool, engine_priorities: bool) -> None:
        """The keys of this file count from now on; what tenants of the same name used stays used."""
        self.keys = keys
        self._forward = forward
        self.engine_priorities = engine_priorities

    def secrets(self, tenant: str, key_id: str = "") -> tuple[bytes, ...]:
        """Secrets for ids that prove this tenant: the first one makes them, each of them proves. A configured
        one comes first, then that of the key which the client used: a replica whose key file is a version
        behind or ahead takes that key, or the client would not get there either."""
        files = (self._secret, None if self.isolation is None else self.isolation.secret)
        configured = [secret for file in files if file is not None for secret in file.all()]
        return (*configured, *self.keys.secrets(tenant, key_id))

    def enter(self, tenant: Tenant) -> TenantRequest:
        """A request of this tenant. Raises ``ApiError`` (429)."""
        return TenantRequest(tenant, self._clock)

    def owner_of(self, fields: _Fields) -> tuple[Tenant, str]:
        """Tenant and id of the key in these header fields. Raises ``ApiError`` (401)."""
        key = _key(fields)
        owner = None if key is None else self.keys.owner_of(key)
        if owner is None:
            self.stats.unknown += 1
            raise invalid_key(given=key is not None)
        return self.account(owner[0]), owner[1]

    def tenant_of(self, fields: _Fields) -> Tenant:
        """Tenant of the key in these header fields. Raises ``ApiError`` (401)."""
        return self.owner_of(fields)[0]

    def account(self, name: str) -> Tenant:
        """Of this tenant, by the rules that hold now."""
        now, rules = self._clock(), self.keys.rules(name)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, rules, now, self._note)
        tenant.follow(rules, now)
        return tenant

    def _note(self, name: str) -> None:
        self._changed[name] = None

    def uses(self, names: Collection[str] | None = None) -> dict[str, Use]:
        """For other processes: what tenants have used, of those that did; ``names``: of these."""
        now, tenants = self._clock(), self._tenants
        some = tenants.keys() if names is None else tenants.keys() & names
        found = {name: tenants[name].use(now) for name in some}
        return {name: use for name, use in found.items() if use is not None}

    def changed(self, count_max: int) -> list[str]:
        """Tenants that used something since they were last returned, at most ``count_max``."""
        names = list(islice(self._changed, count_max))
        for name in names:
            del self._changed[name]
        return names

    def knows(self, tenant: str) -> bool:
        return tenant in self.keys.table.tenants

    def used_elsewhere(self, other: Hashable, tenant: str, before: Use | None, use: Use) -> bool:
        """Count the use at another process; False: refused. ``LimitKeeper``."""
        return self.account(tenant).used_elsewhere(other, before, use, self._clock())

    def forget_other(self, other: Hashable) -> None:
        """Drop a process's active requests. ``LimitKeeper``."""
        for tenant in self._tenants.values():
            tenant.forget_other(other)

    def for_engines(self, fields: _Fields) -> _Fields:
        """These fields of a client without its credentials, and without a rank, which is not its choice."""
        if self._forward:
            return [field for field in fields if field[0] != RANK]
        return [*(field for field in fields if field[0] not in _NOT_FOR_ENGINES), *self._engine_fields]

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
