"""The flags that say where a shared index is, the same for every subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from router.config.load import load
from router.replication.settings import IndexSettings

IndexFlag = Annotated[
    str | None,
    Parameter(
        help="Index shared by several replicas: redis://, rediss://, redis+sentinel://, redis+cluster:// "
        "(docs/redis.md). Without a password; see --index-file."
    ),
]
IndexFileFlag = Annotated[
    Path | None, Parameter(help="File that holds the URL of the shared index, for one with a password.")
]


def index_settings(url: str | None, path: Path | None, namespace: str | None = None) -> IndexSettings:
    """Where the index is, from flags and environment. Raises ``ConfigError``, for a password in a flag."""
    flags = {"index.url": url, "index.namespace": namespace}
    given = {key: value for key, value in flags.items() if value is not None}
    return load(flags=given, index_file=path).config.index
