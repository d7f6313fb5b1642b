"""``kvatlas explain``: why a prompt hits no further on each engine of a running router."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from kvatlas.router.admission.claims import TARGET
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.openai.apis import CHAT, COMPLETION, PROMPT_APIS, RESPONSES
from kvatlas.router.tools.ops_client import (
    OPS_PORT_HINT,
    ask,
    make_table,
    ops_headers,
    output_console,
    reason,
    router_url,
)

_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 64 << 20
BODY_BYTES_MAX = 64 << 20
# Values of ``--api``, and the path of each.
PATHS: Final = {name: path for path, name in PROMPT_APIS.items()}
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class PromptError(Exception):
    """A request that cannot be explained; the message names the file and the reason."""


class _Fields(msgspec.Struct):
    """The fields of a body that determine how it is read."""

    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_body(path: Path) -> bytes:
    """Read the request's file. Raises ``PromptError``."""
    try:
        with path.open("rb") as file:
            body = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from None
    if len(body) > BODY_BYTES_MAX:
        raise PromptError(f"{path}: over {BODY_BYTES_MAX} bytes")
    return body


def endpoint_of(path: Path, body: bytes, api: str | None) -> str:
    """Return the path of ``api``; without it that of a chat, completion or response, or ``tokens``, by the
    body's fields. Raises ``PromptError``.
    """
    if api is not None:
        return PATHS[api]
    fields = _fields(path, body)
    if fields.token_ids is not msgspec.UNSET:
        return "tokens"
    if fields.messages is not msgspec.UNSET:
        return CHAT
    if fields.prompt is not msgspec.UNSET:
        return COMPLETION
    if fields.input is not msgspec.UNSET:
        return RESPONSES
    raise PromptError(f"{path}: expected messages, prompt, input or token_ids in it")


def router_body(path: Path, body: bytes, api: str | None) -> bytes:
    """Convert the body for a router's explain endpoint: token ids become a completion prompt."""
    if endpoint_of(path, body, api) != "tokens":
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except _BAD_JSON as error:
        raise PromptError(f"{path}: not the JSON of a request: {error}") from None
    fields["prompt"] = fields.pop("token_ids")
    return msgspec.json.encode(fields)


def _fields(path: Path, body: bytes) -> _Fields:
    try:
        return msgspec.json.decode(body, type=_Fields)
    except _BAD_JSON as error:
        raise PromptError(f"{path}: not the JSON of a request: {error}") from None


class ExplainOptions(msgspec.Struct, frozen=True):
    """Arguments of ``kvatlas explain``."""

    request: Path
    router: str
    api: str | None = None
    slo_ttft_ms: float | None = None


def run_explain(options: ExplainOptions, *, as_json: bool) -> int:
    """Returns 0 if explained, 1 if the router refuses, 2 for unusable input."""
    try:
        _check(options)
        router = router_url(options.router)
        asked = router_body(options.request, read_body(options.request), options.api)
        return _ask(options, router, asked, as_json=as_json)
    except (ConfigError, PromptError) as error:
        print(f"kvatlas explain: {error}", file=sys.stderr)
        return 2


def _check(options: ExplainOptions) -> None:
    if options.api is not None and options.api not in PATHS:
        raise ConfigError(f"--api {options.api!r}: expected one of {', '.join(PATHS)}")
    target_ms = options.slo_ttft_ms
    if target_ms is not None and not 0 < target_ms < float("inf"):
        raise ConfigError(f"--slo-ttft-ms: {target_ms} is not a number above 0")


def _ask(options: ExplainOptions, router: str, body: bytes, *, as_json: bool) -> int:
    url = f"{router}/kvatlas/explain"
    if options.api is not None:
        url += f"?path={PATHS[options.api]}"
    headers = {"content-type": "application/json", **ops_headers()}
    if options.slo_ttft_ms is not None:
        headers[TARGET.decode()] = f"{options.slo_ttft_ms}"
    try:
        status, text = ask(url, headers=headers, body=body, timeout_s=_TIMEOUT_S, bytes_max=_ANSWER_BYTES_MAX)
    except OSError as error:
        raise PromptError(f"{error}; {OPS_PORT_HINT}") from None
    if status != 200:
        message = reason(text) or text[:200].decode(errors="replace")
        print(f"kvatlas explain: {url}: {status}: {message}", file=sys.stderr)
        return 1
    try:
        response = msgspec.json.decode(text, type=RouterAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(f"{url}: not the response of a kvatlas router: {error}") from None
    if options.slo_ttft_ms is not None and response.slo is None:
        problem = "--slo-ttft-ms was not used: set policy.service_levels = true at the router"
        print(f"kvatlas explain: {problem}", file=sys.stderr)
    if as_json:
        print(text.decode().rstrip())
        return 0
    console = output_console()
    console.print(_router_table(response))
    if response.slo is not None:
        console.print(_target_line(response.slo, response.refused), soft_wrap=True)
        console.print(_target_table(response.slo))
    return 0


class RouterHit(msgspec.Struct):
    """Hit in tokens by medium."""

    GPU: int = 0
    offloaded: int = 0


class RouterEngine(msgspec.Struct):
    """Fields shown of one engine in a router's response."""

    engine: str
    feed: str = ""
    mode: str = ""
    why_unknown: str = ""
    hit_tokens: RouterHit = msgspec.field(default_factory=RouterHit)
    shared_prefix_tokens: int = 0
    ended_by: dict[str, Any] | None = None
    cost: dict[str, Any] = {}


class EngineForecast(msgspec.Struct):
    """Predicted first token at one engine, in seconds, and how long after the target it comes."""

    engine: str
    first_token_s: float
    late_s: float


class TargetForecast(msgspec.Struct):
    """Predictions against the time left until the request's target."""

    left_s: float
    engines: list[EngineForecast]


class RouterAnswer(msgspec.Struct):
    """Response of ``POST /kvatlas/explain`` (router/api/views.py)."""

    prompt: dict[str, Any]
    choice: dict[str, Any]
    engines: list[RouterEngine]
    slo: TargetForecast | None = None
    refused: dict[str, float] | None = None


def _router_table(response: RouterAnswer) -> Table:
    chosen = response.choice.get("engine")
    tokens = response.prompt.get("tokens", response.prompt.get("tokens_estimated"))
    title = f"a prompt of {tokens} tokens: {chosen} ({response.choice.get('reason')})"
    columns = ("<feed", "<mode", ">hit", ">offloaded", ">shared_prefix", ">cost ms", "the match ended")
    table = make_table("engine", *columns, title=title)
    for e in response.engines:
        ended = e.why_unknown
        if e.ended_by is not None:
            ended = f"{e.ended_by.get('spec_class')} at {e.ended_by.get('at_token')}"
        total = e.cost.get("total_s")
        cost = f"{1000 * total:,.1f}" if isinstance(total, int | float) else ""
        numbers = (e.hit_tokens.GPU, e.hit_tokens.offloaded, e.shared_prefix_tokens)
        style = "bold" if e.engine == chosen else ""
        table.add_row(e.engine, e.feed, e.mode, *[f"{n:,}" for n in numbers], cost, ended, style=style)
    return table


def _target_line(slo: TargetForecast, refused: Mapping[str, float] | None) -> str:
    late = sum(each.late_s > 0 for each in slo.engines)
    line = f"target in {1000 * slo.left_s:,.0f} ms: {late} of {len(slo.engines)} would miss it"
    return line if refused is None else f"{line}; refused for a wait of {1000 * refused['wait_s']:,.0f} ms"


def _target_table(slo: TargetForecast) -> Table:
    table = make_table("engine", ">first token ms", ">late ms")
    for each in slo.engines:
        late_ms = f"{1000 * each.late_s:,.0f}" if each.late_s else ""
        table.add_row(each.engine, f"{1000 * each.first_token_s:,.0f}", late_ms)
    return table
