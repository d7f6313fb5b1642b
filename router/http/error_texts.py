"""Errors in words, for logs and for people: no name of a Python class, no address that the caller knows."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from typing import Any, Literal, get_args, get_origin

import msgspec

_NUMBER = re.compile(r"\[Errno (\d+)\]")
_TEXT_LENGTH_MAX = 300
_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection closed"),
    (TimeoutError, "no answer in time"),
    (socket.gaierror, "host name not known"),
    (msgspec.ValidationError, "JSON of another form"),
    (msgspec.DecodeError, "not JSON"),
    (RecursionError, "nested too deeply"),
    (MemoryError, "not enough memory"),
)
_DETAILED = (msgspec.ValidationError,)
_OS_TEXTS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EADDRINUSE: "address already in use; stop what listens there, or give another port",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


class NotConnectedError(OSError):
    """No connection to a server; ``problem`` is the reason in words, ``errno`` that of the cause."""

    def __init__(self, errno: int | None, problem: str) -> None:
        super().__init__(problem)
        self.errno = errno
        self.problem = problem


def describe_error(error: BaseException) -> str:
    """Describe an error on one line."""
    text = _error_text(error)
    return " ".join(text.split())[:_TEXT_LENGTH_MAX]


def _error_text(error: BaseException) -> str:
    if isinstance(error, NotConnectedError):
        return error.problem
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or error.strerror}"
    for kind, words in _TEXTS:
        if isinstance(error, kind):
            return f"{words} ({error})" if kind in _DETAILED else words
    if isinstance(error, OSError):
        return _os_error_text(error)
    return _detail(error)


def _detail(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding.upper()}"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return str(error) or "failed without a reason"


def _os_error_text(error: OSError) -> str:
    """Describe an ``OSError``, also one of several attempts (IPv4 and IPv6) with the same number."""
    numbers = {int(number) for number in _NUMBER.findall(str(error))}
    if error.errno is not None:
        numbers.add(error.errno)
    if len(numbers) == 1:
        (number,) = numbers
        return _OS_TEXTS.get(number) or os.strerror(number)[:1].lower() + os.strerror(number)[1:]
    return error.strerror or str(error) or "failed without a reason"


def fields_of(struct: type[msgspec.Struct]) -> str:
    """Names of its fields, with the values of those that have only a few."""
    return ", ".join(f"{one.name}{_choices(one.type)}" for one in msgspec.structs.fields(struct))


def _choices(kind: Any) -> str:
    parts = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    values = [str(value) for part in parts for value in get_args(part)]
    return f" ({', '.join(values)})" if values else ""
