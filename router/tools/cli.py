"""Command-line arguments of the capture, trace, key, index and doctor commands.

Light to import: each command imports its implementation when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvatlas.router.config.flags import (
    ConfigFlag,
    EngineFlags,
    IndexFileFlag,
    IndexFlag,
    JsonFlag,
    JsonLinesFlag,
    RouterFlag,
    TokenizerFlag,
)
from kvatlas.router.config.load import index_settings, parse_engine

Pieces = Annotated[Path, Parameter(help="A capture (all its pieces, in order) or a recorded trace.")]


def record(
    *,
    engine: Annotated[
        list[str] | None,
        Parameter(
            help="URL[,events=..][,replay=..][,topic=..][,dp-rank=N], or, without a server, "
            "events=tcp://..[,replay=tcp://..][,topic=..][,source=NAME]; repeat for more."
        ),
    ] = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="File to write: .jsonl.gz or .jsonl.")],
    seconds: Annotated[
        float | None, Parameter(help="Stop after this many seconds; otherwise at Ctrl-C.")
    ] = None,
    rotate_mb: Annotated[
        float | None, Parameter(help="Start another file (NAME.00000.jsonl.gz, ..) after this many MB.")
    ] = None,
    max_mb: Annotated[
        float | None,
        Parameter(
            help="Maximum MB of all files: the oldest rotated files are deleted; a single file ends there."
        ),
    ] = None,
    redact: Annotated[
        bool,
        Parameter(
            help="Write zeros for token ids: hashes stay valid, but their scheme can no longer be detected."
        ),
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Record the events that engines publish, history first; status 1 if the capture is incomplete."""
    from kvatlas.router.tools.record import RecordOptions, run_record

    options = RecordOptions(output, seconds, rotate_mb, max_mb, redact)
    return run_record(engine or [], options, as_json=json)


def replay(
    *paths: Pieces,
    to_seq: Annotated[int | None, Parameter(help="Stop each engine after this sequence number.")] = None,
    source: Annotated[str | None, Parameter(help="Only this engine of the capture.")] = None,
    samples: Annotated[int, Parameter(help="Number of points in time at which residency is shown.")] = 10,
    json: JsonFlag = False,
) -> int:
    """Play a capture: show residency per engine, group and medium over time."""
    from kvatlas.router.tools.replay import ReplayOptions, run_replay

    return run_replay(ReplayOptions(paths, to_seq, source, samples), as_json=json)


def explain(
    *,
    request: Annotated[Path, Parameter(help="JSON: the body of a request, or an object with token_ids.")],
    router: RouterFlag,
    api: Annotated[
        str | None,
        Parameter(
            help="API of the request: chat, completions, messages, responses, batch, generate, cohere."
        ),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None,
        Parameter(help="Target for the first token; shows by how much each engine would miss it."),
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Explain why a prompt hits as far as it does on each engine: the spec class and block that ended the
    match.
    """
    from kvatlas.router.tools.explain import ExplainOptions, run_explain

    return run_explain(ExplainOptions(request, router, api, slo_ttft_ms), as_json=json)


def verify(
    *paths: Annotated[Path, Parameter(help="Recorded traces: files or folders.")],
    json: JsonLinesFlag = False,
    cold: Annotated[
        bool,
        Parameter(
            help="Predict each prompt from the events before it only; no prediction is required while "
            "nothing is known. Without it, groups and hashes are first learned from the whole trace."
        ),
    ] = False,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
) -> int:
    """Replay recorded traces through the serving code; status 0 only if every prediction is exact."""
    from kvatlas.router.tools.verify import run_verify

    shared = None if index is None and index_file is None else index_settings(index, index_file)
    return run_verify(list(paths), as_json=json, index=shared, cold=cold)


def engine(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="HTTP port; 0 picks a free one.")] = 0,
    set_: Annotated[
        list[str] | None,
        Parameter(
            name="--set",
            help="Any setting of the simulated engine: KEY=VALUE, e.g. groups=gptoss-like; repeat for more.",
        ),
    ] = None,
) -> int:
    """Run one simulated engine: OpenAI HTTP API, vLLM metrics and real KV events, without GPU or model."""
    from kvatlas.router.tools.engine import run_engine

    return run_engine(host, port, set_ or [])


keys_app = App(name="keys", help="Client API keys: create one, or list a key file (docs/tenants.md).")

_KeyFileFlag = Annotated[
    Path,
    Parameter(name="--file", help="The key file (keys.file of the routers); created if it does not exist."),
]


@keys_app.command(name="add")
def keys_add(
    *,
    file: _KeyFileFlag,
    tenant: Annotated[str, Parameter(help="Tenant of the key; a new tenant has no limits.")],
    name: Annotated[str, Parameter(help="Description of the key, stored in the file.")] = "",
    stdin: Annotated[bool, Parameter(help="Read an existing key from standard input.")] = False,
) -> int:
    """Create a key and add it to the file; the key is printed once and not stored."""
    from kvatlas.router.tools.keys import run_add

    return run_add(file, tenant=tenant, name=name, stdin=stdin)


@keys_app.command(name="list")
def keys_list(*, file: _KeyFileFlag) -> int:
    """List tenants, their limits and the digests of their keys; status 2 if a router would refuse the
    file.
    """
    from kvatlas.router.tools.keys import run_list

    return run_list(file)


def top(
    *,
    router: RouterFlag = "http://127.0.0.1:9001",
    interval: Annotated[float, Parameter(help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print one snapshot and stop.")] = False,
    json: JsonLinesFlag = False,
) -> int:
    """Watch a running router, engine by engine; q or Ctrl-C quits. Without a terminal: print one snapshot."""
    from kvatlas.router.tools.top import run_top

    return run_top(router, interval_s=interval, once=once, as_json=json)


index_app = App(name="index", help="Inspect an index that several routers share.")

_ModelFlag = Annotated[str | None, Parameter(help="Base model; all models if not given.")]
_NamespaceFlag = Annotated[
    str | None, Parameter(help="Prefix of every key, as configured at the routers (index.namespace).")
]


@index_app.command
def stats(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    json: JsonFlag = False,
) -> int:
    """Show blocks, bytes per block, engines with their generations, lease holders and feed states."""
    from kvatlas.router.tools.index import run_stats

    return run_stats(index_settings(index, index_file, namespace), model=model, as_json=json)


@index_app.command(name="verify")
def index_verify(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    engine: EngineFlags = None,
    settle: Annotated[
        float, Parameter(help="Seconds a difference must persist to count (the index lags by one write).")
    ] = 5.0,
    json: JsonFlag = False,
) -> int:
    """Recompute residency from the live feeds and compare it with the index; status 0 only if both agree.
    --engine gives the event addresses of engines for which the index has none, or wrong ones.
    """
    from kvatlas.router.tools.index import run_index_verify

    return run_index_verify(
        index_settings(index, index_file, namespace),
        model=model,
        engines=tuple(parse_engine(text) for text in engine or []),
        settle_s=settle,
        as_json=json,
    )


def doctor(
    *,
    engine: EngineFlags = None,
    router: Annotated[
        str | None,
        Parameter(
            help="URL of a running router's ops port: its view is compared; without --engine its engines are "
            "checked."
        ),
    ] = None,
    tokenizer: TokenizerFlag = None,
    config: ConfigFlag = None,
    seconds: Annotated[float, Parameter(help="Seconds to listen for live events.")] = 3.0,
    timeout: Annotated[float, Parameter(help="Seconds to wait for each answer.")] = 5.0,
    probe: Annotated[
        bool,
        Parameter(
            help="Send a few small prompts to each API of each engine, and compare predicted with real hits."
        ),
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Examine engines and a router as kvatlas uses them; exits with 1 if it finds a problem, and says how to
    fix it.
    """
    from kvatlas.router.tools.doctor.command import run_doctor
    from kvatlas.router.tools.doctor.examine import ExamineSettings

    settings = ExamineSettings(seconds=seconds, timeout_s=timeout, probe=probe)
    return run_doctor(
        engines=engine or [],
        router=router,
        tokenizer=tokenizer,
        config=config,
        settings=settings,
        as_json=json,
    )
