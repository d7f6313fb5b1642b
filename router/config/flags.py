"""Options that several commands have: one name, one type, one sentence. Light to import.

Where a default is not None, cyclopts prints it; the others say theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvatlas.router.config.schema import ServerConfig

_SERVER = ServerConfig()

EngineFlags = Annotated[
    list[str] | None,
    Parameter(
        help="An engine: URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N][,role=..]; repeat "
        "for more. Without events= the engine is asked for its event endpoints; role= is prefill, decode or "
        "both."
    ),
]

HostFlag = Annotated[
    str | None, Parameter(help=f"Address to listen on; 0.0.0.0 for all (default {_SERVER.host}).")
]
PortFlag = Annotated[
    int | None, Parameter(help=f"Port to listen on; 0 takes a free one (default {_SERVER.port}).")
]
ConfigFlag = Annotated[Path | None, Parameter(help="TOML configuration file (docs/configuration.md).")]
TokenizerFlag = Annotated[
    str | None,
    Parameter(
        help="Tokenizer of the served model(s), where not what the engines say they serve: a directory with "
        "tokenizer.json, ORG/NAME[@REVISION] of the hub, or off."
    ),
]
SetFlags = Annotated[
    list[str] | None, Parameter(name="--set", help="Any other setting: SECTION.KEY=VALUE; repeat for more.")
]
PrintFlag = Annotated[bool, Parameter(help="Print the merged configuration with its sources, and stop.")]
CheckFlag = Annotated[bool, Parameter(help="Check the configuration, and stop.")]
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
JsonFlag = Annotated[bool, Parameter(help="One JSON object instead of a table.")]
JsonLinesFlag = Annotated[bool, Parameter(help="One JSON object per line instead of a table.")]

RouterFlag = Annotated[str, Parameter(help="URL of a running router's ops port.")]

# Of simulated fleets.
GROUPS = Parameter(help="gpt-oss-like, gemma3-like, mamba-hybrid, full, or a JSON file with the groups.")
BlockTokensFlag = Annotated[int, Parameter(help="Tokens per block of the models known by name.")]
KvSizeFlag = Annotated[
    float, Parameter(help="KiB of KV cache that one token takes in full attention, for what tiers move.")
]
ServedModelFlag = Annotated[
    str | None, Parameter(help="Only requests of this model, where a usage record has several.")
]
ProcessesFlag = Annotated[int | None, Parameter(help="Worker processes (default: one per core).")]
