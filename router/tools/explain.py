"""``kvatlas explain``: why a prompt hits no further, from a capture or a running router."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from publisher.block_hash import ALGORITHMS, HashScheme
from router.admission.admission_queue import TARGET
from router.config.errors import ConfigError
from router.config.load import load
from router.config.schema import Config
from router.index.learn.layout import ModelFacts
from router.index.model import HashedPrompt
from router.openai.body import peek
from router.placement.candidate import Candidate, Confidence, Hit, PolicySettings, placement_request
from router.placement.policies import ArmState, policy
from router.prompts.settings import ANY_MODEL
from router.tools.capture import is_trace, read_capture, with_progress
from router.tools.explain_state import (
    PATHS,
    Boundary,
    EngineExplanation,
    MissingBlock,
    PromptError,
    explain_engine,
    read_body,
    read_prompt,
    router_body,
)
from router.tools.ops_client import ask, make_table, ops_headers, output_console, reason, router_url
from router.tools.replay_player import Player, up_to
from router.tools.trace_verification import RecordingError, trace_facts

# The engine that would be selected, from the state in a capture. A capture has no load, so all engines count
# as idle.


_CONFIDENCE: dict[str, Confidence] = {"native": "exact", "learned": "learned", "assumed": "assumed"}


class Selection(msgspec.Struct, frozen=True):
    """The engine selected among idle ones."""

    engine: str
    reason: str
    hit_tokens: int
    uncached_tokens: int


def select_engine(
    engines: Sequence[EngineExplanation],
    prompt: HashedPrompt,
    scheme: HashScheme | None,
    settings: PolicySettings,
) -> Selection:
    """Select an engine by the policy. ``scheme`` gives the keys that break ties."""
    candidates = [
        Candidate(
            e.engine,
            Hit(
                e.hit_tokens,
                e.offloaded_tokens - e.hit_tokens - e.storage_tokens,
                e.storage_tokens,
                max(e.shared_prefix_tokens, e.offloaded_tokens),
                confidence=_CONFIDENCE.get(e.mode, "none"),
            ),
        )
        for e in engines
    ]
    hashes = prompt.hashes(scheme) if scheme is not None else ()
    request = placement_request(prompt.num_tokens, hashes)
    made = policy(settings.policy)(candidates, request, settings, ArmState())
    return Selection(made.engine_id, made.reason, engines[made.index].hit_tokens, made.uncached_tokens)


_TIMEOUT_S = 30.0
# Of a hash block and of the look-ahead: more than any block of vLLM.
_TOKENS_MAX = 1 << 20
_ANSWER_BYTES_MAX = 64 << 20
_SCHEME_KEYS = {"seed", "size", "lookahead", "tagged"}


class ExplainOptions(msgspec.Struct, frozen=True):
    """Arguments of ``kvatlas explain``; the source is ``paths`` (a capture) or ``router`` (its URL)."""

    request: Path
    paths: tuple[Path, ...] = ()
    router: str | None = None
    at: int | None = None
    tokenizer: str | None = None
    config: Path | None = None
    hash_scheme: str | None = None
    api: str | None = None
    slo_ttft_ms: float | None = None


def run_explain(options: ExplainOptions, *, as_json: bool) -> int:
    """Returns 0 if explained, 1 if no hit can be predicted or the router refuses, 2 for unusable input."""
    try:
        _check(options)
        router = router_url(options.router)
        body = read_body(options.request)
        if router is not None:
            asked = router_body(options.request, body, options.api)
            return _query_router(options, router, asked, as_json=as_json)
        return _explain(options, body, as_json=as_json)
    except (RecordingError, ConfigError, PromptError) as error:
        print(f"kvatlas explain: {error}", file=sys.stderr)
        return 2


def parse_scheme(text: str) -> HashScheme:
    """Parse ``ALGO[,seed=..][,size=N][,lookahead=N][,tagged=true|false]``. Raises ``ConfigError``."""
    algo, *options = text.split(",")
    values: dict[str, Any] = {"algo": algo}
    for option in options:
        name, separator, value = option.partition("=")
        if name not in _SCHEME_KEYS or not separator:
            known = ", ".join(sorted(_SCHEME_KEYS))
            raise ConfigError(f"--hash-scheme {text!r}: {option!r} is not one of {known} with =VALUE")
        values["hash_block_size" if name == "size" else name] = value
    try:
        scheme = msgspec.convert(values, HashScheme, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--hash-scheme {text!r}: {error}") from None
    if algo not in ALGORITHMS:
        raise ConfigError(f"--hash-scheme {text!r}: algorithm {algo!r}: expected {', '.join(ALGORITHMS)}")
    for field, given, least in (("size", scheme.hash_block_size, 1), ("lookahead", scheme.lookahead, 0)):
        if not least <= given <= _TOKENS_MAX:
            raise ConfigError(
                f"--hash-scheme {text!r}: {field}={given}: expected {least} to {_TOKENS_MAX} tokens"
            )
    return scheme


def _check(options: ExplainOptions) -> None:
    if bool(options.paths) == (options.router is not None):
        raise ConfigError("give either a capture FILE or --router URL")
    if options.api is not None and options.api not in PATHS:
        raise ConfigError(f"--api {options.api!r}: expected one of {', '.join(PATHS)}")
    if options.router is not None and (options.at is not None or options.hash_scheme is not None):
        raise ConfigError("--at and --hash-scheme are for captures; a router explains its present state")
    if options.at is not None and options.at < 0:
        raise ConfigError(f"--at: {options.at} is not a seq")
    target_ms = options.slo_ttft_ms
    if target_ms is not None and options.router is None:
        raise ConfigError("--slo-ttft-ms needs --router URL: a capture has no load to predict seconds from")
    if target_ms is not None and not 0 < target_ms < float("inf"):
        raise ConfigError(f"--slo-ttft-ms: {target_ms} is not a number above 0")


def _explain(options: ExplainOptions, body: bytes, *, as_json: bool) -> int:
    scheme = None if options.hash_scheme is None else parse_scheme(options.hash_scheme)
    models = {ANY_MODEL: {"tokenizer": options.tokenizer}} if options.tokenizer is not None else {}
    config = load(options.config, models=models).config
    prompt = read_prompt(options.request, body, config, options.api)
    player = Player(_facts(options, body, config))
    player.learn(with_progress(read_capture(options.paths), "learning groups and hash scheme", quiet=as_json))
    player.play_all(with_progress(up_to(read_capture(options.paths), options.at), "playing", quiet=as_json))
    if not player.runs:
        raise RecordingError(f"{options.paths[0]}: no frames up to that seq")
    engines = [_hinted(player, explain_engine(player, run.source, prompt, scheme)) for run in player.runs]
    used = scheme or next((s for s in (player.fleet.engine(e.engine).scheme for e in engines) if s), None)
    made = select_engine(engines, prompt, used, config.policy)
    if as_json:
        print(msgspec.json.encode(_summary(options, prompt, engines, made)).decode())
    else:
        _show(prompt, engines, made)
    return 1 if all(engine.mode == "unknown" for engine in engines) else 0


def _facts(options: ExplainOptions, body: bytes, config: Config) -> ModelFacts:
    if options.config is None and is_trace(options.paths[0]):
        return trace_facts(options.paths[0])
    return config.model(peek(body).model or ANY_MODEL).facts()


def _hinted(player: Player, engine: EngineExplanation) -> EngineExplanation:
    """Report that the hash scheme cannot be detected because token ids were redacted."""
    if not player.run_of(engine.engine).redacted or engine.mode == "native":
        return engine
    why = "token ids are redacted: give --hash-scheme, e.g. sha256,size=16"
    return msgspec.structs.replace(
        engine,
        mode="unknown",
        why_unknown=why,
        ended_by=None,
        next_boundary=None,
        shared_prefix_boundary=None,
    )


def _summary(
    options: ExplainOptions, prompt: HashedPrompt, engines: Sequence[EngineExplanation], made: Selection
) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt.num_tokens,
        "at": options.at,
        "choice": msgspec.to_builtins(made),
        "engines": [msgspec.to_builtins(engine) for engine in engines],
    }


def _show(prompt: HashedPrompt, engines: Sequence[EngineExplanation], made: Selection) -> None:
    columns = ("engine", ">seq", ">hit", ">offloaded", ">shared_prefix", "the match ended")
    table = make_table(*columns, title=f"a prompt of {prompt.num_tokens:,} tokens")
    for e in engines:
        numbers = (e.hit_tokens, e.offloaded_tokens, e.shared_prefix_tokens)
        style = "bold" if e.engine == made.engine else ""
        table.add_row(e.engine, str(e.seq), *[f"{n:,}" for n in numbers], _ended(e), style=style)
    console = output_console()
    console.print(table)
    console.print(
        f"choice, all engines idle: {made.engine} ({made.reason}), {made.uncached_tokens:,} tokens to compute"
    )


def _ended(engine: EngineExplanation) -> str:
    lines = [f"{c.spec_class} alone: {c.hit_tokens}" for c in engine.by_class]
    if engine.mode == "unknown":
        lines.append(engine.why_unknown)
    elif engine.whole_prompt:
        lines.append("complete hit: only the last tokens, which are always computed, are missing")
    else:
        boundaries = (engine.next_boundary, engine.shared_prefix_boundary)
        lines += [_boundary(boundary) for boundary in boundaries if boundary is not None]
    if engine.history:
        lines.append(f"history incomplete: {engine.history}")
    return "\n".join(lines)


def _boundary(boundary: Boundary) -> str:
    first = boundary.first
    if first is None:
        return f"{boundary.tokens} tokens: every block is present, but the engine's search does not get there"
    more = f" (and {boundary.missing_blocks - 1} more)" if boundary.missing_blocks > 1 else ""
    where = f"group {first.group} block {first.block} [{first.tokens[0]}..{first.tokens[1]})"
    return f"{boundary.tokens} tokens need {first.spec_class}, {where}{more}: {_why(first)}"


def _why(block: MissingBlock) -> str:
    at = "" if block.seq is None else f" at seq {block.seq}, event {block.event}"
    stored = "" if block.stored_seq is None else f" (stored at seq {block.stored_seq})"
    offloaded = f", held in {'/'.join(block.offloaded)}" if block.offloaded else ""
    return f"{block.why}{at}{stored}{offloaded}"


def _query_router(options: ExplainOptions, router: str, body: bytes, *, as_json: bool) -> int:
    url = f"{router}/kvatlas/explain"
    if options.api is not None:
        url += f"?path={PATHS[options.api]}"
    headers = {"content-type": "application/json", **ops_headers()}
    if options.slo_ttft_ms is not None:
        headers[TARGET.decode()] = f"{options.slo_ttft_ms}"
    try:
        status, text = ask(url, headers=headers, body=body, timeout_s=_TIMEOUT_S, bytes_max=_ANSWER_BYTES_MAX)
    except OSError as error:
        raise PromptError(str(error)) from None
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
