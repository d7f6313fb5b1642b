"""Tries everything of a configuration that can fail, before anything listens."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import structlog

from kvatlas.router.admission.key_file import KeyFileError
from kvatlas.router.api.admin_tokens import AdminFileError
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import CannotStartError
from kvatlas.router.http.tls import TlsError, server_context
from kvatlas.router.observe.traces import TracesNotInstalledError
from kvatlas.router.prompts.model_dir import ModelDirError
from kvatlas.router.replication.index_url import SettingsError, redacted

_log = structlog.get_logger()
TLS_KEYS = "server.tls_cert_file, tls_key_file or client_ca_file"


def check(config: Config) -> Router:
    """Build everything that can fail before listening. Raises ``ConfigError`` naming the key."""
    try_usage_record(config)
    try:
        router = Router(config)
        if config.server.tls.given:
            server_context(config.server.tls, TLS_KEYS)
    except (AdminFileError, CannotStartError, KeyFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None
    except ModelDirError as error:
        raise ConfigError(f"models: {error}") from None
    except SettingsError as error:
        raise ConfigError(f"index: {error}") from None
    check_engines(config)
    return router


def check_engines(config: Config) -> None:
    """Check that engines are configured or can be discovered. Raises ``ConfigError``."""
    if not config.engines and not config.fleet.discovers and not config.admin.enabled:
        raise ConfigError(
            "no engine configured: give --engine URL (repeatable), e.g. kvatlas serve --engine "
            "http://HOST:8000, [[engines]] in the --config file, or a source of engines "
            "(fleet.kubernetes.selector or inference_pool, fleet.dns.names, fleet.file.path, or the admin "
            "API)"
        )


def try_usage_record(config: Config) -> None:
    """Create and remove a file: permissions do not show whether the file system accepts files.

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
    """Refuse an index of another schema. An unreachable one does not prevent the start.

    Raises ``ConfigError``.
    """
    if not config.index.is_shared:
        return
    from kvatlas.router.replication.registry import IndexRefused  # noqa: PLC0415  # redis-py comes with it
    from kvatlas.router.replication.service import check_index  # noqa: PLC0415

    try:
        problem = asyncio.run(check_index(config.index))
    except IndexRefused as error:
        raise ConfigError(f"index: {error}") from None
    if problem:
        _log.warning("starting without the shared index", index=redacted(config.index.url), problem=problem)
