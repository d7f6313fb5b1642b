"""Keys of clients: their settings, and the file of tenants and keys, replaced while the router runs.

Keys are 256 random bits, so a plain SHA-256 of one tells nothing of it: there is nothing to guess through.
Invariants: the file has no key, only digests; an unusable file leaves everything as it was,
and says so; comparing takes the same time whichever key was sent.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog

from kvatlas.router.admission.fair_queue import Priority
from kvatlas.router.http.error_texts import describe_error, fields_of
from kvatlas.router.http.watched_file import WatchedFile

_log = structlog.get_logger()
_FILE_BYTES_MAX = 16 * 1024 * 1024
_SECRETS_MAX = 8
_LOOK_EVERY_S = 1.0
_BEGIN = "kva-"
# Of the SHA-256 of a key: they name it in lists and records.
KEY_ID_DIGITS = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_DIGEST_TEXT = "64 hexadecimal digits, as kvatlas keys add writes them"
_Positive = Annotated[int, msgspec.Meta(gt=0)]
_DIGEST_PATTERN = r"^[0-9a-f]{64}$"
_Digest = Annotated[str, msgspec.Meta(pattern=_DIGEST_PATTERN)]


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of clients. Without a file none is needed, and ``Authorization`` is passed on to engines."""

    file: str | None = None
    """TOML file with tenants, their limits, and the SHA-256 of each key; `kvatlas keys add` writes it
    ([tenants.md](tenants.md)). Read again when it changes. Every request to an engine, and `/v1/models`, then
    needs a key: `Authorization: Bearer KEY` or `x-api-key: KEY`. Set it if clients need limits, or must be
    told apart."""
    engine_priorities: bool = False
    """Engines schedule by priority (vLLM's `--scheduling-policy priority`): requests of tenants of the class
    `low` get `priority` 1, of `high` -1, where their bodies have none. `policy.engine_priority` does so.
    Switch it on if the engines were started so."""
    isolate: Literal["off", "tenant", "group"] = "off"
    """Isolate caches: the router sets `cache_salt` in every prompt, one for each tenant, or one for each
    `cache_group` of the key file (a tenant without one is its own group). Needs `keys.file` and
    `keys.isolate_secret_file` ([tenants.md](tenants.md#cache-isolation)). Switch it on if tenants must not
    learn from hit times what others asked."""
    secret_file: str | None = None
    """File with a secret, at least 32 bytes, the same for all routers of a fleet, under which ids of
    responses (`/v1/responses`) prove their tenant. Not set: `isolate_secret_file`, else the tenant's own
    keys: ids made under a key that was taken out of the file then end with the next restart. Read again when
    it changes; ids under earlier secrets count until a restart. Set it if keys are rotated while responses
    are stored."""
    isolate_secret_file: str | None = None
    """File with the secret that salts are derived from, at least 32 bytes; the same for all routers of a
    fleet. Read again when it changes: prompts are then cached under new salts. Set it with `isolate`."""
    client_salts: Literal["combine", "refuse"] = "combine"
    """With `keys.isolate`: a client's own `cache_salt` separates its prompts further, or is refused (400).
    `refuse` if clients must not split their own cache."""
    forward: bool = False
    """Pass the client's key on to engines. By default it is taken out, and `fleet.api_key_file` is sent where
    that is set. Switch it on if the engines check the clients' keys themselves."""

    def __post_init__(self) -> None:
        if self.isolate == "off":
            return
        if self.file is None:
            raise ValueError(f"isolate = {self.isolate}: needs keys.file, which says whose request it is")
        if self.isolate_secret_file is None:
            raise ValueError(f"isolate = {self.isolate}: needs keys.isolate_secret_file")


class WaitTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Longest predicted waits, in seconds: of all in ``[queue]``, of a tenant in the key file, whose targets
    count first. Raises ``ValueError`` for 0 or less."""

    wait_target_s: float | None = None
    """A request is refused (429 `predicted_wait`) where every engine that could take it is predicted to let
    it wait longer than this many seconds, its own prefill not counted. Not set: none is refused
    ([queue.md](queue.md#admission-by-predicted-wait)). Set it to the wait after which your clients give
    up."""
    wait_target_high_s: float | None = None
    """The same for requests of class `high`. Not set: `wait_target_s`. Set it if that differs by class."""
    wait_target_low_s: float | None = None
    """The same for requests of class `low`. Not set: `wait_target_s`. Set it if that differs by class."""

    def __post_init__(self) -> None:
        for name in WaitTargets.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value}: expected seconds, more than 0")

    def wait_target(self, priority: int) -> float | None:
        """Target of a class (``QueueTicketRequest.priority``)."""
        own = None
        if priority == Priority.HIGH:
            own = self.wait_target_high_s
        elif priority == Priority.LOW:
            own = self.wait_target_low_s
        return self.wait_target_s if own is None else own

    @property
    def has_wait_targets(self) -> bool:
        """Whether requests of any class may be refused."""
        return any(getattr(self, name) is not None for name in WaitTargets.__struct_fields__)


class KeyFileError(ValueError):
    """A key file that cannot be used; the message names the setting, the file and the entry."""


class TenantRules(WaitTargets, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rights and limits of a tenant; a limit that is not set does not apply. Its targets for waits count
    before those of ``[queue]``; ``inf``: never refused."""

    cache_group: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """With `keys.isolate = "group"`: tenants of the same group share cached prefixes."""
    models: tuple[str, ...] = ("*",)
    """Models it may name; ``*`` stands for any characters."""
    requests_per_minute: _Positive | None = None
    uncached_tokens_per_minute: _Positive | None = None
    """Prompt tokens that engines had to compute, since no cache held them."""
    concurrent_requests: _Positive | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    """Class of its requests where they wait for engines; they may ask for a lower one, not for a higher."""
    slo_ttft_ms: _Positive | None = None
    """Target for the first token of its requests (``policy.service_levels``); they may ask for another."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    """Its share beside other tenants of the class, where they wait for engines."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a tenant; ``name`` is for people."""

    tenant: str
    sha256: _Digest
    name: str = ""


class KeyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tenants: dict[str, TenantRules] = {}
    keys: tuple[KeyEntry, ...] = ()


class KeyStats(msgspec.Struct):
    """Counters for metrics."""

    unknown: Annotated[int, "kvatlas_keys_unknown_total"] = 0
    """Requests refused with 401: without a key, or with one that is not in the key file."""
    salted: Annotated[int, "kvatlas_keys_salted_total"] = 0
    """Requests that were given a `cache_salt` of their tenant or group (`keys.isolate`)."""
    salts_refused: Annotated[int, "kvatlas_keys_salts_refused_total"] = 0
    """Requests refused for a `cache_salt` or names of media of their own, or since their API takes no salt
    (`keys.isolate`)."""
    isolate_secret_failures: Annotated[int, "kvatlas_keys_isolate_secret_failures_total"] = 0
    """Failed attempts to read the changed `keys.isolate_secret_file` or `keys.secret_file`; the last secret
    stays in use."""


class KeyFile:
    """The keys now valid. Raises ``KeyFileError`` for an unusable file at the start."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self.path = path
        self._watched = WatchedFile(path, clock=clock, every_s=_LOOK_EVERY_S)
        self._secrets: dict[str, dict[str, bytes]] = {}
        """By tenant, and by the id of the key."""
        self._take(read_key_file(path))

    def owner_of(self, key: bytes) -> tuple[str, str] | None:
        """The tenant a key belongs to, and the key's id; None for an unknown key."""
        self._refresh()
        digest = hashlib.sha256(key).hexdigest()
        # The table is entered by a part of the digest, which an attacker cannot steer; the rest is compared
        # in constant time, also where there is no such part.
        entry = self._by_part.get(digest[:16], self._nobody)
        return (entry.tenant, digest[:KEY_ID_DIGITS]) if hmac.compare_digest(entry.sha256, digest) else None

    def secrets(self, tenant: str, key_id: str = "") -> tuple[bytes, ...]:
        """A secret of each key of a tenant: that of this key first, then those of its present keys, then of
        keys that it had. Known to no other tenant, the same in every router, and not changed by keys of
        others."""
        found = self._secrets.get(tenant, {})
        own = found.get(key_id)
        return tuple(found.values()) if own is None else (own, *found.values())

    def rules(self, tenant: str) -> TenantRules:
        """Return the rules that hold now."""
        return self.table.tenants.get(tenant, _NO_LIMITS)

    def _refresh(self) -> None:
        if self._watched.changed():
            self.reload()

    def reload(self) -> None:
        """Read it now."""
        try:
            self._take(read_key_file(self._watched.path))
            _log.info("keys reloaded", keys=len(self.table.keys), tenants=len(self.table.tenants))
        except KeyFileError as error:
            _log.warning("keys not reloaded, the old ones stay valid", problem=str(error))

    def _take(self, table: KeyTable) -> None:
        self.table = table
        made: dict[str, dict[str, bytes]] = {}
        for entry in table.keys:
            secret = hashlib.sha256(b"kvatlas" + entry.sha256.encode()).digest()
            made.setdefault(entry.tenant, {})[entry.sha256[:KEY_ID_DIGITS]] = secret
        for tenant in table.tenants:
            known = made.get(tenant, {})
            known |= {key: one for key, one in self._secrets.get(tenant, {}).items() if key not in known}
            made[tenant] = dict(list(known.items())[:_SECRETS_MAX])
        self._secrets = made
        self._by_part = {entry.sha256[:16]: entry for entry in table.keys}
        self._nobody = KeyEntry(tenant="", sha256=secrets.token_hex(32))


_NO_LIMITS = TenantRules()


def read_key_file(path: Path, setting: str = "keys.file") -> KeyTable:
    """Raises ``KeyFileError`` naming what is wrong; never shows a key."""
    where = f"{setting}: {path}"
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise KeyFileError(f"{where}: larger than {_FILE_BYTES_MAX} bytes")
        tree = tomllib.loads(data.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = describe_error(error) if isinstance(error, OSError) else error
        raise KeyFileError(f"{where}: {why}") from None
    try:
        table = msgspec.convert(tree, KeyTable)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{where}: {_entry_fault(tree, str(error))}") from None
    digests = set()
    for number, entry in enumerate(table.keys):
        if entry.tenant not in table.tenants:
            raise KeyFileError(
                f"{where}: keys[{number}].tenant = {entry.tenant!r}: add [tenants.{entry.tenant}]"
            )
        if entry.sha256[:16] in digests:
            raise KeyFileError(f"{where}: keys[{number}].sha256: this key stands there twice")
        digests.add(entry.sha256[:16])
    for name in table.tenants:
        check_tenant_name(name, where)
    return table


def _entry_fault(tree: dict[str, Any], fault: str) -> str:
    """Name the entry before its fault; the library names none of the tenants."""
    fault = fault.replace(f"`str` matching regex {_DIGEST_PATTERN!r}", _DIGEST_TEXT)
    why, _, place = fault.partition(" - at `$.")
    tenants = tree.get("tenants")
    for name, rules in tenants.items() if isinstance(tenants, dict) else ():
        try:
            msgspec.convert(rules, TenantRules)
        except msgspec.ValidationError:
            place = place.replace("tenants[...]", f"tenants.{name}").rstrip("`")
            key = place.rpartition(".")[2]
            if isinstance(rules, dict) and key in rules:
                place += f" = {rules[key]!r}"
            break
    place = place.rstrip("`")
    if "unknown field" in why or "enum value" in why:
        entry = KeyEntry if place.startswith("keys[") else KeyTable
        kind = TenantRules if place.startswith("tenants.") else entry
        why += f"; expected {fields_of(kind)}"
    return f"{place}: {why}" if place else why


def check_tenant_name(name: str, where: str) -> None:
    """Raises ``KeyFileError``: names stand in metrics and logs."""
    if not _NAME.fullmatch(name):
        raise KeyFileError(
            f"{where}: tenant {name!r}: expected up to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )


def new_key() -> str:
    """Make a key that cannot be guessed."""
    return _BEGIN + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
