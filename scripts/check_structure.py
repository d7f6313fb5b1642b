"""Checks the structure of the code where linters do not: single names, bounded tasks, no dead code.

    python scripts/check_structure.py

Rules: no banned turns of phrase; no public class name twice in a package; client errors are made in
``router/openai/errors.py`` only; tasks are started in task groups only; sockets, threads, processes and waits
that virtual time cannot replace are in listed modules only; tests with loops of their own are marked; a
Protocol has at least two classes that fulfil it (test doubles count); no circle of imports; the parts of a
module mention each other; an override is called by a base class; no function, class, method or property
without a user; every folder has a part (``scripts/parts.py``). Prints one line per fault; status 1 if there
is any. Exceptions are listed here, each with its reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import parts
from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("router", "publisher", "connectors")
API_ERRORS = "router/openai/errors.py"

LONE_TASKS = frozenset(
    {
        # ends by drain(), not by being cancelled; awaited where its block ends
        "router/http/side_ports.py",
        # ended by `close`
        "router/replication/redis_client.py",
        "router/proxy/deaths.py",
        # awaited where it is started, also when that is cancelled
        "router/services/dns_source.py",
        # cancelled and awaited in a `finally` of the function, or at the exit of the object, that starts it
        "router/simulation/demo/run.py",
        "router/tools/doctor/examine.py",
        "router/tools/index_verifier.py",
        "router/tools/record.py",
        "router/tools/recorder.py",
        "router/tools/top.py",
        "publisher/simulator/http_agents.py",
        "publisher/simulator/server.py",
    }
)
"""Modules that start tasks outside a task group."""

REAL_THINGS = frozenset(
    {
        "socket.socket",
        "socket.create_server",
        "socket.create_connection",
        "socket.socketpair",
        "threading.Thread",
        "threading.Timer",
        "time.sleep",
        "asyncio.new_event_loop",
        "subprocess.run",
        "subprocess.Popen",
        "os.fork",
        "uuid.uuid1",
        "random.SystemRandom",
    }
)
"""Calls that tests on virtual time cannot replace: sockets come from the loop and from ``zmq.Context``,
threads from a pool or ``asyncio.to_thread``, time and randomness from ``time``, ``random``, ``secrets``,
``uuid4``."""

REAL_MODULES = frozenset(
    {
        # processes, and what they inherit and hand over
        "router/workers/supervisor.py",
        "router/workers/context.py",
        "router/prompts/trial.py",
        "router/simulation/demo/engines.py",
        "router/simulation/demo/store.py",
        "router/simulation/demo/gateway.py",
        # ends the process when its loop hangs
        "router/server_lifecycle.py",
        # write files beside the loop for as long as they are open
        "router/observe/usage.py",
        "router/tools/capture_writer.py",
        # a certificate by openssl
        "router/services/epp/own_certificate.py",
        # runs in an engine's process, which has no loop
        "publisher/vllm_plugin.py",
    }
)
"""Modules that make these calls."""

SINGLE_PROTOCOLS = frozenset(
    {
        "EngineRequest",  # vLLM's own request fulfils it
        "SharedView",  # keeps placement below replication
        "StreamConnection",  # keeps a stream below its connection
    }
)
"""Protocols with one fulfilling class."""

CALLED_FROM_OUTSIDE = frozenset(
    {
        # httptools
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_message_complete",
        # asyncio
        "eof_received",
        "pause_writing",
        # uvicorn
        "handle_exit",
        "capture_signals",
        "main_loop",
        "index_verify",  # cyclopts
        "get_cached_block",  # vLLM's managers
        # vLLM's connectors
        "wait_for_layer_load",
        "save_kv_layer",
        "_get_connector_classes_and_configs",
    }
)
"""Names that a framework calls."""


OWN_LOOPS = frozenset({"tests/world/test_loop.py"})  # a loop in a thread beside the virtual one
"""Tests on virtual time that run a loop of their own."""

PART_LINES_MIN = 40
"""Shorter parts of a module, as a constant with its function, are no subject of their own."""
DECLARATIONS = ("Settings", "Stats", "Options")
"""Ends of the names of structs that stand beside what reads or counts them."""

SEPARATE = {
    # Each check of the doctor stands alone; the file has those of one area.
    "router/tools/doctor/checks/cache.py",
    "router/tools/doctor/checks/interfaces.py",
    "router/tools/doctor/checks/prompts.py",
    "router/tools/doctor/checks/router.py",
    # Both halves of one thing: counters and their labels, the driver's calls and torch's.
    "connectors/reports.py",
    "connectors/transfer/cuda_driver.py",
}
"""Modules with parts that do not mention each other."""


BANNED = re.compile(
    r"\b(so many|whoever|nobody(?![\"':}])|(is|are) (told|said)|let go|anew|once more|all the same"
    r"|of no (use|sense)|amiss|in vain|of late|says where|none of ours|none the less"
    r"|thereof|wherein|hitherto|forthwith|whilst|lest)\b",
    re.IGNORECASE,
)
"""Archaic or inverted turns; "nobody" is allowed as a name in data."""
FIRST_LINES = re.compile(
    r'"""(What|Who|Whose|Whatever) |\bSee ``|def test (what|who|whose|nor) ', re.IGNORECASE
)
"""First lines and names of tests that are no noun phrase or sentence."""
TEXTS = ("Makefile", "*.md", "docs/*.md", "scripts/*.sh", "charts/*/README.md", "examples/**/*.*")
"""Pages and scripts that are read for banned turns, beside the Python of every folder."""


class Module(NamedTuple):
    """One parsed file; ``path`` is relative to the repository."""

    path: str
    tree: ast.Module
    text: str = ""


def modules(*folders: str) -> Iterator[Module]:
    """Every Python module below these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield Module(path.relative_to(ROOT).as_posix(), ast.parse(text), text)


def banned_phrases(code: list[Module], others: list[Module]) -> Iterator[str]:
    """Turns that the field does not use, in every text and in the names of tests."""
    pages = [path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages}
    texts |= {module.path: module.text for module in (*code, *others)}
    del texts["scripts/check_structure.py"]  # it lists them
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.replace("_", " ") if "def test_" in line else line
            found = BANNED.search(words) or FIRST_LINES.search(words)
            if found is not None:
                yield f"{path}:{number}: {found[0]!r}; say it in plain technical English"


def doubled_names(code: list[Module]) -> Iterator[str]:
    """Public classes of one name in one package."""
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in code:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[module.path.partition("/")[0], node.name].append(f"{module.path}:{node.lineno}")
    for (_, name), places in sorted(where.items()):
        if len(places) > 1:
            yield f"{places[0]}: class {name} also stands at {', '.join(places[1:])}; rename one"


def banned_calls(code: list[Module]) -> Iterator[str]:
    """Client errors made outside their module; tasks that no task group waits for; calls without a seam."""
    found: set[tuple[str, str]] = set()
    for module in code:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where = f"{module.path}:{node.lineno}"
            if called.rpartition(".")[2] == "ApiError" and module.path != API_ERRORS:
                yield f"{where}: ApiError is made in {API_ERRORS} only; add a function there"
            inside = not module.path.startswith("connectors/")  # which run in an engine's processes
            if called in REAL_THINGS and inside and module.path not in REAL_MODULES:
                yield f"{where}: {called} cannot run on virtual time; ask the loop, or list the module"
            lone = called in {"asyncio.create_task", "asyncio.ensure_future"} or called.endswith(
                "loop.create_task"
            )
            if lone and module.path not in LONE_TASKS:
                yield f"{where}: {called} outside a task group; nobody would see it fail"
            found |= {(module.path, "LONE_TASKS")} if lone else set()
            found |= {(module.path, "REAL_MODULES")} if called in REAL_THINGS else set()
    for name, listed in (("LONE_TASKS", LONE_TASKS), ("REAL_MODULES", REAL_MODULES)):
        for path in sorted(listed):
            if (path, name) not in found:
                yield f"{path}: is listed in {name}, and makes no such call"


def real_loops(tests: list[Module]) -> Iterator[str]:
    """Tests with a loop of their own in real time, of which no mark says that real time is their subject."""
    for module in tests:
        marked = "mark.real" in module.text or "mark.vllm" in module.text or module.path in OWN_LOOPS
        if "asyncio.run(" in module.text and "/test_" in module.path and not marked:
            yield f"{module.path}: asyncio.run is real time; use `run` of tests/support/waiting.py or mark it"


def lonely_protocols(code: list[Module], tests: list[Module]) -> Iterator[str]:
    """Protocols that fewer than two classes fulfil, by the names of their methods."""
    bodies = {
        (module.path, node.name): node
        for module in [*code, *tests]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    by_name = {name: node for (_, name), node in bodies.items()}
    protocols = {
        key: node
        for key, node in bodies.items()
        if any(ast.unparse(base).partition("[")[0] in {"Protocol", "typing.Protocol"} for base in node.bases)
    }
    provided = {key: _all_methods(node, by_name) for key, node in bodies.items() if key not in protocols}
    for (path, name), protocol in sorted(protocols.items()):
        wanted = set(_methods(protocol))
        if not wanted or path.startswith("tests/") or name in SINGLE_PROTOCOLS:
            continue
        fulfil = sum(wanted <= methods for methods in provided.values())
        if fulfil < 2:
            yield f"{path}:{protocol.lineno}: Protocol {name} is fulfilled by {fulfil}; use the class"


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Assign):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))


def _all_methods(node: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> set[str]:
    """Of a class and of those it inherits from, with the attributes that its methods set on ``self``."""
    names = set(_methods(node))
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            names.add(part.attr)
    for base in node.bases:
        parent = by_name.get(ast.unparse(base).partition("[")[0].rpartition(".")[2])
        if parent is not None and parent is not node:
            names |= _all_methods(parent, by_name)
    return names


def dead_code() -> Iterator[str]:
    """Functions, classes, methods and properties that nothing uses, tests included."""
    vulture = Vulture(
        ignore_decorators=["@app.*", "@*_app.*", "@_get*", "@get*", "@*check*", "@pytest.*", "@given*"]
    )
    vulture.scavenge([str(ROOT / part) for part in (*PACKAGES, "benchmarks", "scripts", "tests")])
    for item in vulture.get_unused_code(min_confidence=60):
        path = Path(item.filename).relative_to(ROOT).as_posix()
        if item.typ not in {"function", "class", "method", "property"} or not path.startswith(PACKAGES):
            continue
        if item.name not in CALLED_FROM_OUTSIDE and not item.name.startswith("__"):
            yield f"{path}:{item.first_lineno}: nothing uses {item.typ} {item.name}"


def circles(code: list[Module]) -> Iterator[str]:
    """Modules that import each other, also inside functions or for types only."""
    names = {
        f"kvatlas.{module.path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}": module
        for module in code
    }
    imports = {name: _imported(module.tree, names.keys()) - {name} for name, module in names.items()}
    # What cannot be reached from itself is in no circle.
    while ends := {name for name, others in imports.items() if not others}:
        imports = {name: others - ends for name, others in imports.items() if name not in ends}
    begins = set(imports)
    while begins:
        begins = set(imports) - {other for others in imports.values() for other in others}
        imports = {name: others for name, others in imports.items() if name not in begins}
    if imports:
        yield f"a circle of imports: {', '.join(sorted(imports))}"


def separate_parts(code: list[Module]) -> Iterator[str]:
    """Modules whose parts do not mention each other, in either direction or through a third part."""
    for module in code:
        parts_of = _parts(module.tree)
        if len(parts_of) > 1 and module.path not in SEPARATE:
            yield f"{module.path}: {' and '.join(parts_of)} do not mention each other; cut it, or list it"
        elif len(parts_of) < 2 and module.path in SEPARATE:
            yield f"{module.path}: is listed in SEPARATE, and is in one piece"


def _parts(tree: ast.Module) -> list[str]:
    """The first class or function of each part of a module that has at least ``PART_LINES_MIN`` lines."""
    defined = [(_defined(node), node) for node in tree.body]
    place = {name: number for number, (names, _) in enumerate(defined) for name in names}
    root = list(range(len(defined)))

    def of(number: int) -> int:
        while root[number] != number:
            number = root[number]
        return number

    for number, (names, node) in enumerate(defined):
        if names:
            for part in ast.walk(node):
                # A name, or a quoted annotation.
                name = part.id if isinstance(part, ast.Name) else getattr(part, "value", None)
                if isinstance(name, str) and name in place:
                    root[of(number)] = of(place[name])
    lines: dict[int, int] = defaultdict(int)
    first: dict[int, str] = {}
    for number, (names, node) in enumerate(defined):
        if isinstance(node, ast.ClassDef) and node.name.endswith(DECLARATIONS):
            continue
        if names:
            lines[of(number)] += (node.end_lineno or 0) - node.lineno + 1
        if names and not isinstance(node, ast.Assign | ast.AnnAssign):
            first.setdefault(of(number), names[0])
    return [name for number, name in first.items() if lines[number] >= PART_LINES_MIN]


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return []


def uncalled_overrides(code: list[Module]) -> Iterator[str]:
    """Methods that override one of a base class and are mentioned by their own class only."""
    classes = {
        node.name: (module.path, node)
        for module in code
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    mentioned: dict[str, set[str]] = defaultdict(set)
    for module in code:
        for node in module.tree.body:
            holder = node.name if isinstance(node, ast.ClassDef) else module.path
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute):
                    mentioned[part.attr].add(holder)
    for name, (path, node) in classes.items():
        inherited = {
            method
            for base in node.bases
            if (parent := classes.get(ast.unparse(base).partition("[")[0])) is not None
            for method in _methods(parent[1])
        }
        for part in node.body:
            if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) or part.name not in inherited:
                continue
            if part.name in CALLED_FROM_OUTSIDE or part.name.startswith("__"):
                continue
            if mentioned[part.name] <= {name}:
                yield f"{path}:{part.lineno}: no base class calls {name}.{part.name}, which overrides theirs"


def _imported(tree: ast.Module, names: Container[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in names else node.module for name in whole}
    return {name for name in found if name in names}


def main() -> int:
    """Print every fault; returns the exit status."""
    code, tests = list(modules(*PACKAGES)), list(modules("tests"))
    faults = [
        *banned_phrases(code, [*tests, *modules("benchmarks", "scripts")]),
        *doubled_names(code),
        *banned_calls(code),
        *real_loops(tests),
        *lonely_protocols(code, tests),
        *circles(code),
        *separate_parts(code),
        *uncalled_overrides(code),
        *dead_code(),
        *parts.faults(),
    ]
    for fault in faults:
        print(fault)
    print(f"structure: {len(code)} modules, {len(faults)} fault(s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
