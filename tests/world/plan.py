"""A plan: one world as explicit lists, before it runs.

Everything that a seed decides about a world (engines, configuration, requests, faults) is in here, as values
that JSON carries; the run itself draws only delays. So a plan can be cut down request by request
(``shrink``), be written to a file, and be replayed when the planner has long changed. Times are seconds after
the fleet is ready.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

Api = Literal["chat", "completions", "tokens", "messages", "responses"]
MODEL = "kvatlas-demo"
OPENAI = frozenset({"chat", "completions", "tokens"})
"""APIs with ``n``, ``stream_options`` and the client's request id at the engine."""
PADDING_BYTES = 300_000
"""A large body: several windows of the network, and above what is sent in one piece."""


class ClientRequest(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One client, its conversation of ``turns`` requests, and its manners."""

    at_s: float
    client: int = 0
    """Number of its machine."""
    api: Api = "chat"
    story: int = 0
    """Which text; requests of one story share prefixes."""
    length: int = 1
    """Repetitions of the story's sentence; of ``tokens``: token ids."""
    turns: int = 1
    stream: bool = False
    answer_tokens: int = 5
    prompts: int = 1
    """Of ``tokens``: prompts in one request."""
    answers: int = 1
    """Its ``n``; of ``chat``, ``completions`` and ``tokens``."""
    usage: bool = True
    """Whether a stream is asked to end with its usage; of the same."""
    leaves_s: float | None = None
    """The client hangs up after so long."""
    resets: bool = False
    """It hangs up with a reset instead of a regular end."""
    slow: bool = False
    """It pauses between pieces of a stream."""
    padding_bytes: int = 0
    tenant: str = ""
    router: int = 0
    fields: dict[str, str] = {}
    """Header fields of its own."""
    body: dict[str, Any] = {}
    """Body fields of its own."""
    model: str = MODEL


class Fault(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One event from outside; ``faults`` has the kinds. ``target``: the number of an engine or a router."""

    at_s: float
    kind: str
    target: int = 0
    lasts_s: float = 1.0
    value: float = 0.0
    """Meaning by kind: seconds of a clock's jump, a choice from 0 to 1."""


class Plan(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A whole world."""

    seed: int
    """Of the delays."""
    kind: str = "plain"
    engines: tuple[dict[str, Any], ...] = ()
    """Settings of simulated engines; ``groups`` is a name of ``layouts``."""
    spare: tuple[int, ...] = ()
    """Engines that are not there at the start; a ``join`` brings them."""
    requests: tuple[ClientRequest, ...] = ()
    faults: tuple[Fault, ...] = ()
    routers: int = 1
    config: dict[str, Any] = {}
    """Sections of the router's configuration, as in its file."""
    tenants: dict[str, dict[str, Any]] = {}
    """Rules of the key file; empty: clients have no keys."""
    gateway: bool = False
    """Requests reach engines through a gateway that asks the router's endpoint picker."""
    busy_s: float = 0.0
    """Virtual time that a look at a clock takes at most."""
    why: str = ""
    """Of a found defect: what happened, and its cause."""

    def without(self, requests: set[int] | None = None, faults: set[int] | None = None) -> Plan:
        """The same world with only these requests and faults."""
        return msgspec.structs.replace(
            self,
            requests=tuple(r for i, r in enumerate(self.requests) if requests is None or i in requests),
            faults=tuple(f for i, f in enumerate(self.faults) if faults is None or i in faults),
        )


def write(plan: Plan) -> str:
    """JSON for people: one request or fault per line."""
    whole = msgspec.to_builtins(plan)
    lines = []
    for name, value in whole.items():
        if name in ("engines", "requests", "faults"):
            rows = ",\n    ".join(msgspec.json.encode(row).decode() for row in value)
            lines.append(f'  "{name}": [\n    {rows}\n  ]')
        else:
            lines.append(f'  "{name}": {msgspec.json.encode(value).decode()}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(text: str | bytes) -> Plan:
    """Read a plan. Raises ``msgspec.ValidationError``."""
    return msgspec.json.decode(text, type=Plan)


FOUND = Path(__file__).parent / "found"


def found() -> dict[str, Plan]:
    """Plans of defects that worlds found, by name."""
    return {path.stem: read(path.read_bytes()) for path in sorted(FOUND.glob("*.json"))}
