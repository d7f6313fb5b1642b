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

import base64
import hashlib
import hmac
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import structlog

from kvatlas.router.admission.key_file import KeyFile, KeyFileError, KeySettings, KeyStats, TenantRules
from kvatlas.router.admission.others_use import Use
from kvatlas.router.admission.tenants import Tenant, TenantRequest, TenantStats
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.secret_files import warn_if_public
from kvatlas.router.http.watched_file import WatchedFile
from kvatlas.router.openai.apis import SALTED
from kvatlas.router.openai.errors import ApiError, invalid_key, media_name_not_accepted, salt_not_accepted
from kvatlas.router.pd.settings import RANK

_log = structlog.get_logger()
# The output size of SHA-256: a shorter key weakens the HMAC (RFC 2104, section 3).
_SECRET_BYTES_MIN: Final = 32
_SECRET_BYTES_MAX: Final = 4096
# As often as the key file is looked at.
_LOOK_EVERY_S: Final = 1.0
# Under which ids of responses still count.
_SECRETS_KEPT: Final = 8
# Of a client's own salt; vLLM 0.32 takes at most 128.
_SALT_CHARS_MAX: Final = 1024


class SharedSecret:
    """A secret in a file that is read again after a change; one that cannot be used then leaves the last one
    in use, and ``failed`` is called. ``setting`` names the file in errors. Raises ``KeyFileError``."""

    def __init__(
        self, setting: str, path: str, *, clock: Callable[[], float], failed: Callable[[], None]
    ) -> None:
        self._setting = setting
        self._failed = failed
        self._watched = WatchedFile(Path(path), clock=clock, every_s=_LOOK_EVERY_S)
        self.known: tuple[bytes, ...] = (read_secret(self._watched.path, setting),)
        """The secret, then earlier ones."""

    def __call__(self) -> bytes:
        if self._watched.changed():
            try:
                secret = read_secret(self._watched.path, self._setting)
                self.known = tuple(dict.fromkeys((secret, *self.known)))[:_SECRETS_KEPT]
                _log.info("secret reloaded", setting=self._setting)
            except KeyFileError as error:
                self._failed()
                _log.warning("secret not reloaded, the last one stays in use", problem=str(error))
        return self.known[0]

    def all(self) -> tuple[bytes, ...]:
        """The secret, then earlier ones of this process."""
        self()
        return self.known


class Isolation:
    """Salts by tenant or group. Raises ``KeyFileError`` for a secret file that cannot be used."""

    def __init__(self, settings: KeySettings, stats: KeyStats, *, clock: Callable[[], float]) -> None:
        self._by_group = settings.isolate == "group"
        self._combines = settings.client_salts == "combine"
        self.stats = stats
        path = settings.isolate_secret_file or ""
        self.secret = SharedSecret("keys.isolate_secret_file", path, clock=clock, failed=self._not_read)

    def salt(self, tenant: str, rules: TenantRules, own: bytes) -> str:
        """The salt of a request with this JSON value of its own ``cache_salt`` (empty: none): 43 characters.

        Raises ``ApiError`` (400) for a salt of its own that is refused, or is none.
        """
        secret = self.secret()
        given = self._given(own)
        # JSON keeps the parts apart: no name and salt can spell another name and salt.
        message = msgspec.json.encode([*self.group(tenant, rules), given])
        digest = hmac.new(secret, message, hashlib.sha256).digest()
        self.stats.salted += 1
        # base64url: vLLM refuses "@", "/", "\\" and NUL, and more than 128 characters.
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def group(self, tenant: str, rules: TenantRules) -> tuple[str, str]:
        """Kind and name of the set of tenants that share blocks with this one."""
        group = rules.cache_group if self._by_group else ""
        return ("group", group) if group else ("tenant", tenant)

    def check(self, path: str, *, is_form: bool, names_media: bool) -> None:
        """Raises ``ApiError`` (400) for a prompt that cannot be isolated. ``names_media``: by names of the
        client's, in caches of engines that no salt separates."""
        if names_media:
            self.stats.salts_refused += 1
            raise media_name_not_accepted()
        if path not in SALTED or is_form:
            what = f"A form for {path}" if is_form else path
            raise self._refused(
                f"{what} takes no cache_salt, and this router isolates caches; operators can pass it on "
                "without one by proxy.passed_paths"
            )

    def _given(self, own: bytes) -> str | None:
        if own in (b"", b"null"):
            return None
        try:
            given = msgspec.json.decode(own, type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._refused("cache_salt must be a text") from None
        if not self._combines:
            raise self._refused("cache_salt is set by this router; send none")
        if not 0 < len(given) <= _SALT_CHARS_MAX:
            raise self._refused(f"cache_salt must have 1 to {_SALT_CHARS_MAX} characters")
        return given

    def _refused(self, why: str) -> ApiError:
        self.stats.salts_refused += 1
        return salt_not_accepted(why)

    def _not_read(self) -> None:
        self.stats.isolate_secret_failures += 1


def ids_secret(settings: KeySettings, stats: KeyStats, clock: Callable[[], float]) -> SharedSecret | None:
    """The configured secret of ids; None without a file. Raises ``KeyFileError``."""
    if settings.secret_file is None:
        return None

    def failed() -> None:
        stats.isolate_secret_failures += 1

    return SharedSecret("keys.secret_file", settings.secret_file, clock=clock, failed=failed)


def read_secret(path: Path, setting: str) -> bytes:
    """Read a secret. Raises ``KeyFileError`` that names the setting and the file, never the contents."""
    where = f"{setting}: {path}"
    try:
        with path.open("rb") as file:
            secret = file.read(_SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise KeyFileError(f"{where}: {describe_error(error)}") from None
    warn_if_public(path, setting)
    if not _SECRET_BYTES_MIN <= len(secret) <= _SECRET_BYTES_MAX:
        raise KeyFileError(
            f"{where}: {len(secret)} bytes, expected {_SECRET_BYTES_MIN} to {_SECRET_BYTES_MAX}; "
            f"make one with: (umask 077; openssl rand -hex 32 > {path})"
        )
    return secret


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
