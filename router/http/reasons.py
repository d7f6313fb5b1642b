"""Failures in words: why a connection, a call or an answer came to nothing, for logs and for people.

Always true: no name of a Python class, no address that the caller knows already.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

import aiohttp
import msgspec

_NUMBER = re.compile(r"\[Errno (\d+)\]")
_LENGTH_MAX = 300
_WORDS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection closed"),
    (aiohttp.ServerTimeoutError, "no answer in time"),
    (TimeoutError, "no answer in time"),
    (socket.gaierror, "host name not known"),
    (aiohttp.ServerDisconnectedError, "connection closed without an answer"),
    (aiohttp.ClientPayloadError, "the answer ended early"),
    (aiohttp.ClientResponseError, "not an HTTP answer"),
    (msgspec.ValidationError, "JSON of another form"),
    (msgspec.DecodeError, "not JSON"),
    (UnicodeDecodeError, "not UTF-8"),
    (RecursionError, "nested too deeply"),
    (MemoryError, "not enough memory"),
)
_WITH_DETAIL = (msgspec.ValidationError,)


def reason_of(error: BaseException) -> str:
    """Why it failed, on one line."""
    text = _reason(error)
    return " ".join(text.split())[:_LENGTH_MAX]


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # DNS errors and TLS errors are some too
        return _reason(error.os_error)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return _reason(error.certificate_error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or error.strerror}"
    for kind, words in _WORDS:
        if isinstance(error, kind):
            return f"{words} ({error})" if kind in _WITH_DETAIL else words
    if isinstance(error, OSError):
        return _of_system(error)
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
