"""Everything of a configuration that can be wrong, tried before anything listens."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import structlog

from router.admission.key_file import KeyFileError
from router.api.admin.tokens import AdminFileError
from router.app import Router
from router.config.errors import ConfigError
from router.config.schema import Config
from router.http.tls import TlsError, server_context
from router.observe.traces import TracesNotInstalledError
from router.prompts.reader import ModelDirError
from router.replication.redis.url import SettingsError, redacted
from router.serve.server import TLS_KEYS

_log = structlog.get_logger()


def check(config: Config) -> Router:
    """Build everything that can be wrong before listening. Raises ``ConfigError`` naming the key."""
    try_usage_record(config)
    try:
        router = Router(config)
        if config.server.tls.given:
            server_context(config.server.tls, TLS_KEYS)
    except (AdminFileError, KeyFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None
    except ModelDirError as error:
        raise ConfigError(f"models: {error}") from None
    except SettingsError as error:
        raise ConfigError(f"index: {error}") from None
    check_engines(config)
    return router


def check_engines(config: Config) -> None:
    """There are some, or a way to find some. Raises ``ConfigError``."""
    if not config.engines and not config.fleet.discovers and not config.admin.enabled:
        raise ConfigError(
            "no engine configured: give --engine URL (repeatable), e.g. kvatlas serve --engine "
            "http://HOST:8000, [[engines]] in the --config file, or a source of engines "
            "(fleet.kubernetes.selector or inference_pool, fleet.dns.names, fleet.file.path, or the admin "
            "API)"
        )


def try_usage_record(config: Config) -> None:
    """Permissions do not tell of file systems that take no files, so one is made, and is gone at once.

    Raises ``ConfigError`` naming the key.
    """
    for name in ("path", "key_file"):
        text = getattr(config.usage, name)
        if not text:
            continue
        path = Path(text)
        try:
            with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ConfigError(f"usage.{name} = {text!r}: cannot be written: {error.strerror}") from None


def check_shared_index(config: Config) -> None:
    """Refuse an index of another schema. One that cannot be reached is no reason not to start.

    Raises ``ConfigError``.
    """
    if not config.index.is_shared:
        return
    from router.replication.schema.registry import IndexRefused  # noqa: PLC0415  # redis-py comes with it
    from router.replication.service import check_index  # noqa: PLC0415

    try:
        problem = asyncio.run(check_index(config.index))
    except IndexRefused as error:
        raise ConfigError(f"index: {error}") from None
    if problem:
        _log.warning("starting without the shared index", index=redacted(config.index.url), problem=problem)
