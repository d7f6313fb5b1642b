"""Isolation of caches between tenants: cache salts, and the secret of salts and response ids."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from kvatlas.router.admission.key_file import KeyFileError, KeySettings, KeyStats, TenantRules
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.secret_files import warn_if_public
from kvatlas.router.http.watched_file import WatchedFile
from kvatlas.router.openai.apis import SALTED
from kvatlas.router.openai.errors import ApiError, media_name_not_accepted, salt_not_accepted

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
