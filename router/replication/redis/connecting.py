"""What redis-py needs to connect to the target of a URL.

Always true: where ``?ca=`` is given, only certificates of its authorities are accepted.
"""

from __future__ import annotations

import ssl
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from router.replication.redis.url import SettingsError, Target


class TlsConnection(SSLConnection):
    """TLS with a given context. The one that redis-py makes of file names trusts the system's certificate
    authorities beside the given one."""

    def __init__(self, *, tls: ssl.SSLContext, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ssl_context.context = tls


def connection_arguments(target: Target, connect_timeout_s: float) -> dict[str, Any]:
    """What redis-py connects with, but for host and port: no retries, and no time-outs for single reads,
    as every call has a deadline. Raises ``SettingsError`` for unreadable TLS files."""
    arguments: dict[str, Any] = {
        "connection_class": Connection,
        "db": target.db,
        "username": target.username,
        "password": target.password,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
    }
    if target.tls:
        arguments |= {"connection_class": TlsConnection, "tls": _tls_context(target)}
    return arguments


def _tls_context(target: Target) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=target.ca)
        if target.cert or target.key:
            context.load_cert_chain(target.cert or "", target.key)
    except OSError as error:
        raise SettingsError(f"index TLS files: {error}; give PEM files") from error
    return context
