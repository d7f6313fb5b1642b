"""One connection to a Redis or Valkey server, for few commands with large values and a real deadline.

Client libraries limit each read of a socket; here one deadline holds for a whole pipeline, and values go from
the socket into the caller's memory without a copy between. Anything unexpected breaks the link for good: its
owner makes another one. Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from connectors.store.base import Deadline, StoreUnavailable

_DRAIN_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 16


class ServerError(Exception):
    """The server answered one command with an error; the connection is sound."""


class Destination(Protocol):
    """Says where a value of this many bytes goes; None: nowhere, it is not what was expected."""

    def __call__(self, length: int) -> memoryview | None: ...


@dataclass(frozen=True)
class RedisAddress:
    """``host`` and ``port``, or ``unix_path``. The password file is read anew for every connection."""

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
        """OSError or ssl.SSLError where a file is not what it should be."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class RedisLink:
    """``send`` commands, then ``receive`` as many replies, in order."""

    def __init__(self, address: RedisAddress, tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        """Connect and log in. StoreUnavailable: the server is not there, or does not let us in."""
        self._received = bytearray()
        self._socket = self._connect(address, tls, deadline)
        try:
            self._log_in(address, deadline)
        except BaseException:
            self.close()
            raise

    def send(self, commands: Iterable[Sequence[bytes | memoryview]], deadline: Deadline) -> None:
        """Write commands; large parts are not copied."""
        small = bytearray()
        try:
            for command in commands:
                small += b"*%d\r\n" % len(command)
                for part in command:
                    length = part.nbytes if isinstance(part, memoryview) else len(part)
                    small += b"$%d\r\n" % length
                    if length < _DRAIN_BYTES:
                        small += part
                    else:
                        self._write(small, deadline)
                        self._write(part, deadline)
                        small = bytearray()
                    small += b"\r\n"
            self._write(small, deadline)
        except OSError as error:
            raise StoreUnavailable(f"sending failed: {error}") from error

    def receive(self, deadline: Deadline, destination: Destination | None = None) -> int | bytes | None:
        """One reply: a number, a short text, None for nil. ServerError: the command was refused.

        A value for which ``destination`` gives memory is put there and its length returned; one for which it
        gives none is read and dropped, and -1 returned.
        """
        try:
            line = self._line(deadline)
            kind, rest = line[:1], line[1:]
            if kind == b"+":
                return rest
            if kind == b"-":
                raise ServerError(rest.decode("utf-8", "replace"))
            number = int(rest)
            if kind == b":":
                return number
            if kind != b"$":
                raise StoreUnavailable(f"not a reply this client knows: {line[:40]!r}")
            return None if number < 0 else self._value(number, deadline, destination)
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"receiving failed: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    @staticmethod
    def _connect(address: RedisAddress, tls: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
        timeout_s = max(deadline.left_s(), 0.001)
        try:
            if address.unix_path:
                made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                made.settimeout(timeout_s)
                try:
                    made.connect(address.unix_path)
                except OSError:
                    made.close()
                    raise
                return made
            made = socket.create_connection((address.host, address.port), timeout=timeout_s)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is None:
                return made
            try:
                made.settimeout(max(deadline.left_s(), 0.001))
                return tls.wrap_socket(made, server_hostname=address.host)
            except BaseException:
                made.close()
                raise
        except OSError as error:
            raise StoreUnavailable(f"{address}: {error}") from error

    def _log_in(self, address: RedisAddress, deadline: Deadline) -> None:
        commands: list[list[bytes]] = []
        if address.password_file is not None:
            try:
                password = address.password_file.read_bytes().strip()
            except OSError as error:
                raise StoreUnavailable(f"{address}: its password cannot be read: {error.strerror}") from error
            user = [address.username.encode()] if address.username else []
            commands.append([b"AUTH", *user, password])
        if address.db:
            commands.append([b"SELECT", b"%d" % address.db])
        self.send(commands, deadline)
        for command in commands:
            try:
                self.receive(deadline)
            except ServerError as error:
                # The error never repeats what was sent: it would be the password.
                raise StoreUnavailable(f"{address} refused {command[0].decode()}: {error}") from error

    def _write(self, data: bytes | bytearray | memoryview, deadline: Deadline) -> None:
        if data:
            self._wait_at_most(deadline)
            self._socket.sendall(data)

    def _wait_at_most(self, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        self._socket.settimeout(left_s)

    def _line(self, deadline: Deadline) -> bytes:
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) > _LINE_BYTES_MAX:
                raise ValueError("a line without end")
            self._wait_at_most(deadline)
            data = self._socket.recv(_DRAIN_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

    def _value(self, length: int, deadline: Deadline, destination: Destination | None) -> int | bytes:
        if destination is None:
            if length > _LINE_BYTES_MAX:
                raise ValueError(f"an unexpected value of {length} bytes")
            short = bytearray(length)
            self._read_into(memoryview(short), deadline)
            self._end_of_value(deadline)
            return bytes(short)
        target = destination(length)
        if target is None:
            self._drop(length, deadline)
        else:
            self._read_into(target.cast("B"), deadline)
        self._end_of_value(deadline)
        return -1 if target is None else length

    def _end_of_value(self, deadline: Deadline) -> None:
        if self._line(deadline):
            raise ValueError("a value longer than announced")

    def _read_into(self, target: memoryview, deadline: Deadline) -> None:
        have = min(len(self._received), len(target))
        target[:have] = self._received[:have]
        del self._received[:have]
        target = target[have:]
        while target:
            self._wait_at_most(deadline)
            count = self._socket.recv_into(target)
            if not count:
                raise ConnectionError("the server closed the connection")
            target = target[count:]

    def _drop(self, length: int, deadline: Deadline) -> None:
        waste = memoryview(bytearray(min(length, _DRAIN_BYTES)))
        while length:
            some = waste[: min(length, len(waste))]
            self._read_into(some, deadline)
            length -= len(some)
