"""One connection to a Redis or Valkey server, for few commands with large values and a strict deadline.

redis-py connects, logs in, packs and parses. Its timeouts limit single reads, so a server that sends a byte
now and then could block a caller forever; here a timer closes the connection at the deadline of the whole
call. Any unexpected event breaks the link permanently; its owner makes another one. Used by one thread at a
time.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    PythonRespSerializer,
    UnixDomainSocketConnection,
)
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError
from redis.retry import Retry

from kvatlas.connectors.store.base import Deadline, StoreUnavailable

_READ_BYTES = 1 << 20
_COPY_BYTES = 6000

Command = Sequence[bytes | memoryview]
Reply = Any
"""int, bytes, None for nil, or the ``ResponseError`` of a refused command."""


def _encoded(part: bytes | memoryview | str | int) -> bytes | memoryview:
    return str(part).encode() if isinstance(part, str | int) else part


@dataclass(frozen=True)
class RedisAddress:
    """``host`` and ``port``, or ``unix_path``. Every new connection reads the password file."""

    host: str = "127.0.0.1"
    port: int = 6379
    unix_path: str = ""
    db: int = 0
    username: str = ""
    password_file: Path | None = None
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __str__(self) -> str:
        if self.unix_path:
            return f"unix:{self.unix_path}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.db}"

    def tls_context(self) -> ssl.SSLContext | None:
        """TLS context; None without TLS. OSError or ssl.SSLError for an invalid file."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def connection(self, connect_timeout_s: float) -> AbstractConnection:
        """redis-py's connection, not yet connected. OSError if the password file cannot be read."""
        arguments: dict[str, Any] = {
            "db": self.db,
            "username": self.username or None,
            "password": self.password_file.read_text().strip() if self.password_file else None,
            "protocol": 2,
            "driver_info": None,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": connect_timeout_s,
            "socket_read_size": _READ_BYTES,
            "command_packer": PythonRespSerializer(_COPY_BYTES, _encoded),
        }
        if self.unix_path:
            return UnixDomainSocketConnection(path=self.unix_path, **arguments)  # type: ignore[abstract]  # only in its stubs
        tls = self.tls_context()
        if tls is None:
            return Connection(host=self.host, port=self.port, **arguments)
        return TlsConnection(tls, host=self.host, port=self.port, **arguments)


class TlsConnection(Connection):
    """TLS with a given context; redis-py's own class also trusts the system's certificate authorities."""

    def __init__(self, tls: ssl.SSLContext, **arguments: Any) -> None:
        self._tls = tls
        super().__init__(**arguments)  # type: ignore[no-untyped-call]

    def _connect(self) -> socket.socket:
        plain: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        try:
            return self._tls.wrap_socket(plain, server_hostname=self.host)
        except OSError:
            plain.close()
            raise


class RedisLink:
    """A connected and authenticated link. StoreUnavailable if the server is unreachable or refuses the
    login."""

    def __init__(self, address: RedisAddress, deadline: Deadline) -> None:
        try:
            self._connection = address.connection(max(deadline.left_s(), 0.001))
        except OSError as error:
            raise StoreUnavailable(f"{address}: its password cannot be read: {error.strerror}") from error
        try:
            with self._until(deadline):
                self._connection.connect()
        except BaseException as error:
            self.close()
            if isinstance(error.__cause__, AuthenticationError):
                raise StoreUnavailable(f"{address} refused AUTH: {error.__cause__}") from error
            raise

    def run(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """Send commands and return their replies, in order. StoreUnavailable if the link is broken."""
        with self._until(deadline):
            packed = self._connection.pack_commands(commands)
            self._connection.send_packed_command(packed, check_health=False)
            replies = [self._reply() for _ in commands]
            if self._connection.can_read(0):
                raise InvalidResponse("more replies than commands")
        return replies

    def close(self) -> None:
        self._connection.disconnect()

    def _reply(self) -> Reply:
        try:
            return self._connection.read_response(disconnect_on_error=False)
        except (ResponseError, AuthenticationError) as error:
            return error

    @contextmanager
    def _until(self, deadline: Deadline) -> Iterator[None]:
        """Close the connection when the deadline passes, which ends any wait on it."""
        timer = threading.Timer(deadline.left_s(), self._connection.disconnect)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            # A socket closed by the timer raises various errors.
            if deadline.passed():
                raise StoreUnavailable("the deadline passed") from error
            if isinstance(error, RedisError | OSError):
                raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            timer.cancel()
