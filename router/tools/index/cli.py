"""The arguments of ``kvatlas index``. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from router.config.flags import IndexFileFlag, IndexFlag, index_settings
from router.config.load import parse_engine

index_app = App(name="index", help="Look at an index that several routers share.")

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
    json: Annotated[bool, Parameter(help="As JSON.", negative="")] = False,
) -> int:
    """Blocks, bytes per block, engines with their generations, lease holders and feed states."""
    from router.tools.index.command import run_stats

    return run_stats(index_settings(index, index_file, namespace), model=model, as_json=json)


@index_app.command
def dump(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    limit: Annotated[int, Parameter(help="Most blocks to list per model; -1 for all.")] = -1,
) -> int:
    """One JSON line per block: its hash, and which engine holds it where (medium/group)."""
    from router.tools.index.command import run_dump

    return run_dump(index_settings(index, index_file, namespace), model=model, limit=limit)


@index_app.command(name="verify")
def index_verify(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    engine: Annotated[
        list[str] | None,
        Parameter(
            name="--engine",
            help="Event addresses of an engine where the index has none or others: "
            "URL,events=tcp://..[,replay=tcp://..][,topic=..][,dp-rank=N]; repeat for more.",
            negative="",
        ),
    ] = None,
    settle: Annotated[
        float, Parameter(help="Seconds a difference must persist to count (the index lags by one write).")
    ] = 5.0,
    json: Annotated[bool, Parameter(help="As JSON.", negative="")] = False,
) -> int:
    """Recompute residency from the live feeds and compare; status 0 only if the index is exact."""
    from router.tools.index.command import run_index_verify

    return run_index_verify(
        index_settings(index, index_file, namespace),
        model=model,
        engines=tuple(parse_engine(text) for text in engine or []),
        settle_s=settle,
        as_json=json,
    )
