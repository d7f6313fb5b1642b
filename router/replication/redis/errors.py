"""Why the shared index cannot be used now: errors of redis-py and sockets as one exception."""

from __future__ import annotations

from redis.exceptions import AskError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from router.http.reasons import reason_of


class IndexUnavailable(Exception):  # noqa: N818  # a state to be lived with
    """The shared index cannot answer now. ``reason`` is one short word or two, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class ServerError(IndexUnavailable):
    """The server answered a command with an error; ``reason`` is its code, such as ``OOM``."""


def unavailable(error: RedisError | OSError) -> IndexUnavailable:
    """What an error of the client library means for the index."""
    if isinstance(error, AskError):
        return ServerError(error.status_code or "MOVED", f"slot {error.slot_id} is at {error.node_addr}")
    code = getattr(error, "status_code", None)
    if code is not None or isinstance(error, ResponseError):
        word, _, rest = str(error).partition(" ")
        return ServerError(code, str(error)) if code else ServerError(word or "ERR", rest)
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return IndexUnavailable("timeout", str(error))
    return IndexUnavailable("connection", str(error) or reason_of(error))
