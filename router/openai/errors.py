"""Errors a client sees: OpenAI's shape, a stable string code, and the HTTP status that goes with it.

``{"error": {"message", "type", "param", "code"}}``; ``retry-after`` and ``x-should-retry`` are set where
they help the ``openai`` client to do the right thing. Every error of ours is made by a named constructor
below; errors of an engine are passed through as bytes and never come here.
"""

from __future__ import annotations

import math

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]


class ApiError(Exception):
    """An answer to the client that is not a success."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body of the answer, with a newline at its end: terminals show it too."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error}) + b"\n"


_NO_RETRY: Headers = ((b"x-should-retry", b"false"),)


def bad_request(code: str, message: str, *, param: str | None = None) -> ApiError:
    """400: the request itself is wrong; repeating it cannot help."""
    return ApiError(400, code, message, param=param, headers=_NO_RETRY)


_ECHOED_CHARS_MAX = 200


def echoed(text: str) -> str:
    """Quote a value of a client, shortened."""
    return repr(text) if len(text) <= _ECHOED_CHARS_MAX else f"{text[:_ECHOED_CHARS_MAX]!r}..."


def model_not_found(model: str) -> ApiError:
    """404: no engine of the fleet serves this model."""
    return ApiError(
        404,
        "model_not_found",
        f"The model {echoed(model)} is not served here; GET /v1/models lists the served models.",
        kind="not_found_error",
        param="model",
        headers=_NO_RETRY,
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the body is over the configured limit."""
    message = f"The request body is larger than body_bytes_max = {limit_bytes} bytes."
    return ApiError(413, "body_too_large", message, headers=_NO_RETRY)


def body_too_complex(steps_max: int) -> ApiError:
    """413: too many values to look for a field among them."""
    message = (
        "Looking for fields in this request body takes more than "
        f"{steps_max} steps: it has too many fields, strings, lists or objects, or white space or a number "
        "of more than 1 MiB. Send fewer of them."
    )
    return ApiError(413, "body_too_complex", message, headers=_NO_RETRY)


def method_not_allowed(method: str, path: str, allow: str) -> ApiError:
    """405: there is something at this path, for other methods."""
    message = f"{path} does not take {echoed(method)}; it takes {allow}."
    return ApiError(405, "method_not_allowed", message, headers=((b"allow", allow.encode()), *_NO_RETRY))


def encoding_not_supported(encoding: str) -> ApiError:
    """415: the request body is compressed, which no engine undoes."""
    return ApiError(
        415,
        "unsupported_content_encoding",
        f"The request body is encoded as {echoed(encoding)}; send it without a content encoding.",
        headers=_NO_RETRY,
    )


def no_ready_engine(message: str, *, retry_after_s: int = 1) -> ApiError:
    """503: every engine is down, excluded or draining."""
    return ApiError(
        503,
        "no_ready_engine",
        message,
        kind="service_unavailable_error",
        headers=((b"retry-after", str(retry_after_s).encode()),),
    )


def worker_unavailable() -> ApiError:
    """503: the worker process that answers for all is being replaced, or too slow."""
    return _no_room("worker_unavailable", "The worker that answers this is not there now; try again shortly.")


def engine_unreachable() -> ApiError:
    """502: the engines that were tried could not be reached or broke the connection."""
    message = "No engine could be reached, or the connection broke before an answer."
    return ApiError(502, "engine_unreachable", message, kind="service_unavailable_error")


def engine_timeout() -> ApiError:
    """504: an engine did not answer in time."""
    message = "The engine did not answer in time."
    return ApiError(504, "engine_timeout", message, kind="service_unavailable_error")


def stream_broken(message: str) -> ApiError:
    """Sent as an SSE event: the engine died after its answer had begun."""
    return ApiError(502, "engine_stream_broken", message, kind="service_unavailable_error")


_TOLD_CHARS_MAX = 1000


def engine_refused(status: int, body: bytes) -> ApiError:
    """Sent as an SSE event: the engine that was to go on with an answer refused with this status and body."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = None
    error = said.get("error", said) if isinstance(said, dict) else None
    text = error.get("message") if isinstance(error, dict) else None
    text = text if isinstance(text, str) else f"The engine answered with status {status}."
    return ApiError(status if status >= 400 else 502, "engine_refused", text[:_TOLD_CHARS_MAX])


def engine_died(retry_s: int) -> ApiError:
    """503: the engine that had the request died, and it may have been the request that ended it."""
    return ApiError(
        503,
        "engine_died",
        "The engine that computed this request died and is not known to be back. Since the request may have "
        "ended it, no other engine gets it before; retry later.",
        kind="service_unavailable_error",
        headers=((b"retry-after", b"%d" % retry_s),),
    )


def ends_engines(wait_s: float) -> ApiError:
    """503: two engines died with this request."""
    return ApiError(
        503,
        "request_ends_engines",
        "Two engines died while they computed this request: no engine gets it for the next "
        f"{max(1.0, wait_s):.0f} s (proxy.suspect_s).",
        kind="service_unavailable_error",
        headers=((b"retry-after", b"%d" % max(1, math.ceil(wait_s))), *_NO_RETRY),
    )


def unknown_path(path: str, status: int = 404, remedy: str = "") -> ApiError:
    """404: no engine answers this path."""
    message = f"Unknown path {echoed(path)}{': ' + remedy if remedy else ''}."
    return ApiError(status, "path_not_found", message, kind="not_found_error")


def engine_redirects(path: str, status: int) -> ApiError:
    """404: an engine answered with a redirect, which would show its address."""
    message = f"No engine answers {echoed(path)}: it redirects (status {status}), which is not passed on."
    return ApiError(404, "path_not_found", message, kind="not_found_error")


def response_not_found(response_id: str) -> ApiError:
    """404: no such response, or another tenant's."""
    message = f"Response with id {echoed(response_id)} not found."
    return ApiError(404, "response_not_found", message, kind="not_found_error", headers=_NO_RETRY)


def id_in_use(response_id: str) -> ApiError:
    """400: the id chosen for a response names another one already."""
    message = f"request_id {echoed(response_id)} is in use; leave it out, or choose another one."
    return bad_request("id_in_use", message, param="request_id")


def path_not_kept_apart() -> ApiError:
    """403: engines keep what this path stores or returns for all clients alike, and clients have keys."""
    message = (
        "Clients have keys here, and engines do not keep apart by key what this path stores or returns. "
        "Operators of the router can pass it on by proxy.passed_paths."
    )
    return ApiError(403, "path_not_kept_apart", message, kind="permission_error", headers=_NO_RETRY)


def salt_not_accepted(why: str) -> ApiError:
    """400: caches of tenants are kept apart by a salt that the router sets."""
    return bad_request("cache_salt_not_accepted", f"{why}.", param="cache_salt")


def media_name_not_accepted() -> ApiError:
    """400: caches of tenants are kept apart, and engines know media by names that any client may give."""
    message = (
        "Send images, audio and video without a uuid or mm_hashes: this router isolates caches, and engines "
        "keep the media of all clients under these names."
    )
    return bad_request("media_name_not_accepted", message, param="uuid")


def path_not_proxied(path: str) -> ApiError:
    """403: an engine would answer, and every client of it would feel that."""
    message = (
        f"{echoed(path)} affects every client of an engine and is not forwarded; ask the engine itself. "
        "Operators of the router can pass it on by proxy.passed_paths."
    )
    return ApiError(403, "path_not_proxied", message, kind="permission_error", headers=_NO_RETRY)


def on_ops_port(path: str, where: str) -> ApiError:
    """404: answered by the router, but not to everybody."""
    message = f"{path} is not answered on this port but on the router's ops port, {where}."
    return ApiError(404, "ops_port", message, kind="not_found_error")


def ops_name_unknown(host: str) -> ApiError:
    """421: the ops port is asked by a name that is not this machine's."""
    message = (
        f"Host {echoed(host)} is no name by which the ops port is asked without a token: use its IP address, "
        "localhost or server.ops_host, or add the name to server.ops_names."
    )
    return ApiError(421, "ops_name_unknown", message, headers=_NO_RETRY)


def not_json(kind: str) -> ApiError:
    """415: the body is declared to be something else."""
    message = f"content-type {echoed(kind)}: send the request as application/json."
    return ApiError(415, "unsupported_content_type", message, headers=_NO_RETRY)


def internal_error() -> ApiError:
    """500: a fault of ours."""
    message = "Internal error in the router; its log has the details."
    return ApiError(500, "internal_error", message, kind="server_error")


def usage_off() -> ApiError:
    """404: there is nothing to read back."""
    message = "The usage record is off; set usage.path."
    return ApiError(404, "usage_off", message, kind="not_found_error")


def unauthorized(realm: str, key: str) -> ApiError:
    """401: ``realm`` is for those with a token of the setting ``key``."""
    message = f"Not authorized: send Authorization: Bearer with a token from {key}."
    asked = (b"www-authenticate", b'Bearer realm="kvatlas %b"' % realm.encode())
    headers = (asked, *_NO_RETRY)
    return ApiError(401, f"{realm}_unauthorized", message, kind="authentication_error", headers=headers)


def too_often(realm: str, what: str, wait_s: int) -> ApiError:
    """429: more of ``what`` than ``realm`` allows; the next may succeed in ``wait_s`` seconds."""
    return ApiError(
        429,
        f"{realm}_rate_limited",
        f"Rate limit exceeded: too many {what}; retry after {wait_s} s.",
        kind="rate_limit_error",
        headers=((b"retry-after", b"%d" % wait_s),),
    )


def fleet_full() -> ApiError:
    """409: another engine would be one too many."""
    message = "The fleet has fleet.engines_max servers; remove one, or raise the limit."
    return ApiError(409, "fleet_full", message, headers=_NO_RETRY)


def engine_not_found(name: str) -> ApiError:
    """404: an administrator named an engine that is not there."""
    message = f"Engine {name!r} not found; GET /admin/engines lists the engines."
    return ApiError(
        404, "engine_not_found", message, kind="not_found_error", param="engine", headers=_NO_RETRY
    )


def invalid_key(*, given: bool) -> ApiError:
    """401: no key, or an unknown one."""
    said = "The key sent is not known here" if given else "No key was sent"
    message = f"{said}: send Authorization: Bearer with a key that the operator of this router gave you."
    headers = ((b"www-authenticate", b'Bearer realm="kvatlas"'), *_NO_RETRY)
    return ApiError(401, "invalid_api_key", message, kind="authentication_error", headers=headers)


def model_not_allowed(model: str | None) -> ApiError:
    """403: the model is served, but not to this tenant."""
    return ApiError(
        403,
        "model_not_allowed",
        "This key is for some models only, and no model is named."
        if model is None
        else f"The model {echoed(model)} is not open to this key.",
        kind="permission_error",
        param="model",
        headers=_NO_RETRY,
    )


def rate_limited(tenant: str, setting: str, limit: int, wait_s: float, headers: Headers) -> ApiError:
    """429: the tenant has used what it may; ``wait_s`` until there is room again."""
    retry = (b"retry-after", b"%d" % max(1, math.ceil(wait_s)))
    message = f"Limit of {tenant} reached: {setting} = {limit}. Try again in {max(0.001, wait_s):.3f} s."
    kind = "tokens" if "tokens" in setting else "requests"
    return ApiError(429, "rate_limit_exceeded", message, kind=kind, headers=(retry, *headers))


def queue_full(limit: int, ahead_s: float) -> ApiError:
    """429: too many wait already; ``ahead_s`` until one like this could be placed."""
    message = f"All engines are busy, and queue.requests_max = {limit} requests wait; retry later."
    return ApiError(429, "queue_full", message, kind="rate_limit_error", headers=_retry_in(ahead_s))


def queue_timeout(waited_s: float, limit: str, ahead_s: float) -> ApiError:
    """503: no engine had room in the time there was; ``limit`` says what ended the wait."""
    message = f"All engines are busy: no room within {waited_s:.1f} s ({limit}); retry later."
    headers = _retry_in(ahead_s)
    return ApiError(503, "queue_timeout", message, kind="service_unavailable_error", headers=headers)


def predicted_wait(wait_s: float, target_s: float, level_s: float | None = None) -> ApiError:
    """429: every engine is predicted to let the request wait longer than it should; ``level_s``: the target
    for its first token, if that is why."""
    wait = f"All engines are busy: the predicted wait of {wait_s:.1f} s"
    message = f"{wait} exceeds the target of {target_s:g} s; retry later."
    if level_s is not None:
        message = f"{wait} makes the first token later than its target of {level_s:g} s; retry later."
    headers = _retry_in(wait_s - target_s)
    return ApiError(429, "predicted_wait", message, kind="rate_limit_error", headers=headers)


def _retry_in(seconds: float) -> Headers:
    return ((b"retry-after", b"%d" % max(1, math.ceil(min(seconds, _RETRY_S_MAX)))),)


_RETRY_S_MAX = 600


def head_too_large(limit_bytes: int) -> ApiError:
    """431: headers or trailers over the limit."""
    message = f"The request head or trailer is larger than header_bytes_max = {limit_bytes} bytes."
    return ApiError(431, "headers_too_large", message)


def request_timeout(message: str) -> ApiError:
    """408: the client did not send its request in time."""
    return ApiError(408, "request_timeout", message, headers=_NO_RETRY)


def no_tunnel() -> ApiError:
    """405: the router is no proxy in the sense of ``CONNECT``."""
    return ApiError(405, "method_not_allowed", "This is no proxy: CONNECT is not answered.")


def too_many_connections() -> ApiError:
    """503: every connection the router has room for is in use."""
    message = "The router has no free connection; try again shortly."
    return _no_room("too_many_connections", message)


def too_many_bodies() -> ApiError:
    """503: request bodies fill the memory they may have."""
    return _no_room("too_many_bodies", "The router holds too many request bodies; try again shortly.")


def _no_room(code: str, message: str) -> ApiError:
    headers = ((b"retry-after", b"1"),)
    return ApiError(503, code, message, kind="service_unavailable_error", headers=headers)


def retry_after_s(value: bytes | str | None, limit_s: float) -> float:
    """Seconds of a Retry-After field, 0 without one. A date (which needs a shared clock) counts as 1 s."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = 1.0
    return min(seconds, limit_s) if seconds > 0 else 0.0
