"""Failures in words: why a connection, a call or an answer came to nothing, for logs and for people.

Always true: no name of a Python class, no address that the caller knows already.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

import msgspec

_NUMBER = re.compile(r"\[Errno (\d+)\]")
_LENGTH_MAX = 300
_WORDS: tuple[tuple[type[BaseException], str], ...] = (
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
_WORDS_OF_AIOHTTP = {
    "ServerDisconnectedError": "connection closed without an answer",
    "ClientPayloadError": "the answer ended early",
    "ClientResponseError": "not an HTTP answer",
}
"""By name: importing aiohttp would take longer than all else that ``--help`` needs."""
_WITH_DETAIL = (msgspec.ValidationError,)


def reason_of(error: BaseException) -> str:
    """Why it failed, on one line."""
    text = _reason(error)
    return " ".join(text.split())[:_LENGTH_MAX]


def _reason(error: BaseException) -> str:
    for name in ("certificate_error", "os_error"):  # of aiohttp's ClientConnectorError and its kinds
        if isinstance(cause := getattr(error, name, None), Exception):
            return _reason(cause)
    for kind in type(error).__mro__:
        if kind.__name__ in _WORDS_OF_AIOHTTP:
            return _WORDS_OF_AIOHTTP[kind.__name__]
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or error.strerror}"
    for kind, words in _WORDS:
        if isinstance(error, kind):
            return f"{words} ({error})" if kind in _WITH_DETAIL else words
    if isinstance(error, OSError):
        return _of_system(error)
    return _detail(error)


def _detail(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding.upper()}"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return str(error) or "failed without a reason"


def _of_system(error: OSError) -> str:
    """One number of several attempts (IPv4 and IPv6) is the reason of all."""
    numbers = {int(number) for number in _NUMBER.findall(str(error))}
    if error.errno is not None:
        numbers.add(error.errno)
    if numbers == {errno.ECONNREFUSED}:
        return "connection refused"
    if len(numbers) == 1:
        (number,) = numbers
        return os.strerror(number)[:1].lower() + os.strerror(number)[1:]
    return error.strerror or str(error) or "failed without a reason"
