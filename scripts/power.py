"""Measures the power of tests: how many one-line mutations of a part its own fast tests catch.

    python scripts/power.py placement [--sample 40] [--seed 1] [--list]

A fixed sample of mutations is drawn from the lines of ``router/PART`` (or ``publisher/PART``,
``connectors/PART``). The part's tests run once with coverage, which tells the tests that execute a line;
then each mutation is made in a copy of the tree, and the tests of its line run until one fails. What no
test notices is printed with its line: it shows a missing test or dead code. Exit status 1 if less than
``CAUGHT_SHARE_MIN`` are caught.

mutmut and cosmic-ray mutate whole modules; neither draws a sample of a part that stays the same by its seed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CAUGHT_SHARE_MIN = 0.85
RUN_S_MAX = 120.0
"""Of the tests of one mutation; one that makes them hang is caught."""
TESTS_MAX = 60
"""Of one mutation: the tests that execute its line, the quickest of each function first."""
FAST = "not vllm and not envoy and not process and not long"
EXTRA_TESTS = {
    "router/admission": [
        "admission",
        "keys",
        "queue",
        "tenants_apart",
        "cache_isolation",
        "service_levels",
        "router/replication/test_limits.py",
    ],
    "router/placement": [
        "engine_order",
        "pull",
        "first_token",
        "late_events",
        "endings",
        "chosen_engines",
        "estimates",
        "changed_meanwhile",
        "context_lengths",
        "service_levels",
        "prefill_decode",
        "request_metrics",
        "cache_isolation",
        "cache_funnel",
        "engine_deaths",
        "retention_hints",
    ],
    "router/proxy": [
        "moved_requests",
        "endings",
        "request_metrics",
        "split_failures",
        "prefill_decode",
        "rights",
        "tenants_apart",
        "keys",
        "changed_meanwhile",
        "engine_deaths",
        "ended_answers",
    ],
    "router/pd": ["split_failures", "prefill_decode"],
    "router/feeds": ["recovery", "late_events"],
    "router/openai": [
        "client_numbers",
        "work_of_requests",
        "agent_apis",
        "rights",
        "usage",
        "router/proxy/test_screen.py",
        "router/proxy/test_apis.py",
        "router/pd/test_bodies.py",
        "router/prompts/test_bad_bodies.py",
        "router/prompts/test_large_bodies.py",
        "router/admission/queue/test_claims.py",
    ],
    "router/api": [
        "cache_funnel",
        "cache_isolation",
        "concurrency",
        "found_facts",
        "queue",
        "reload",
        "request_metrics",
        "service_levels",
        "sources",
        "router/http/test_cors.py",
        "router/workers/test_merged_view.py",
    ],
    "router/config": ["router/api/test_ops_port.py", "router/cli/test_command_line.py"],
    "router/fleet": ["engines", "scaling", "reload", "sources", "isolation_proof"],
    "router/http": ["router/proxy/test_deaths.py", "router/services/epp/test_exchange.py"],
    "router/observe": ["usage", "traces", "cache_funnel", "sessions", "request_metrics"],
    "publisher/pool": ["publisher/simulator/test_pull.py", "publisher/test_sglang_events.py"],
    "router/tools": ["router/admission/test_key_file.py"],
    "router/index": ["exact", "found_facts", "offloaded", "assumed"],
    "connectors/tier": ["connectors/store/test_store_tier.py", "connectors/offload"],
    "connectors/scheduler": ["connectors/offload", "connectors/multi", "connectors/hits"],
    "router/prompts": ["frontends", "images", "token_ids"],
}
"""Files ``tests/router/app/test_NAME.py``, or others below ``tests``, that show the work of a part through
what uses it."""

NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist"
)
"""All else is: tests read pages and scripts, and the links in ``kvatlas`` lead to the copied folders that
mutations change."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
QUIET_CALLS = re.compile(r"(self\.)?_?log(ger)?\.|warnings\.|gc\.")
"""Calls whose removal no test of behaviour has to notice."""


class Mutation(NamedTuple):
    """``text`` in place of columns ``begin`` to ``end`` (bytes of UTF-8) of a line (counted from 1)."""

    path: str
    line: int
    begin: int
    end: int
    text: str


def mutations(path: str) -> Iterator[Mutation]:
    """One-line mutations of the functions of a module; those of nested functions more than once."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in _walk(statement):
                    yield from _of_node(path, node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without annotations, which nothing evaluates, and ``strict`` of ``zip``,
    which guards what no caller does."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns"}:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST) and getattr(inner, "arg", None) != "strict":
                    yield from _walk(inner)


def _of_node(path: str, node: ast.AST) -> Iterator[Mutation]:
    if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:  # type: ignore[attr-defined]
        return
    for text in _variants(node):
        yield Mutation(path, node.lineno, node.col_offset, node.end_col_offset, text)  # type: ignore[attr-defined]


def _variants(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(left, [operator], [right]):
            yield ast.unparse(ast.Compare(left, [COMPARISONS[type(operator)]()], [right]))
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            if not any(
                isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side) for side in (left, right)
            ):
                yield f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)](), right))})"
        case ast.Call(ast.Name("min" | "max" as name), arguments, keywords):
            other_name = ast.Name("max" if name == "min" else "min")
            yield ast.unparse(ast.Call(other_name, arguments, keywords))
        case ast.Expr(ast.Call() as call) if not QUIET_CALLS.match(ast.unparse(call)):
            yield "pass"
        case ast.Expr(ast.Await(ast.Call())) | ast.AugAssign():
            yield "pass"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield str(value + 1)
        case _:
            return


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str | bytes)


def sample(part: str, count: int, seed: int) -> list[Mutation]:
    """``count`` mutations of the part, the same for the same code and seed; one of a line at most."""
    found = sorted({one for file in _files(part) for one in mutations(file.relative_to(ROOT).as_posix())})
    random.Random(seed).shuffle(found)
    by_line = {(one.path, one.line): one for one in reversed(found)}
    chosen = [one for one in found if by_line[one.path, one.line] == one]
    return chosen[:count]


def _files(part: str) -> list[Path]:
    folder = ROOT / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def tests_by_line(tree: Path, part: str, paths: list[str]) -> dict[tuple[str, int], list[str]]:
    """Tests that execute each line of the part, the quickest of each function first.

    Raises ``RuntimeError`` if one of them fails without a mutation.
    """
    data = tree / "coverage.data"
    source = part if (tree / part).is_dir() else str(Path(part).parent)
    done = _pytest(
        tree, [*paths, f"--cov={source}", "--cov-context=test", "--cov-report=", "--durations=0", "-vv"],
        seconds_max=1800, COVERAGE_FILE=str(data), COVERAGE_CORE="ctrace", PYTHONDONTWRITEBYTECODE="",
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the tests fail without a mutation:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    durations = _durations(done.stdout)
    lines: dict[tuple[str, int], set[str]] = defaultdict(set)
    with closing(sqlite3.connect(data)) as base:
        rows = base.execute(
            "select file.path, context.context, line_bits.numbits from line_bits"
            " join file on file.id = file_id join context on context.id = context_id"
        )
        for path, context, bits in rows:
            test, _, phase = context.partition("|")
            if phase == "run":
                relative = Path(path).relative_to(tree).as_posix()
                for index, byte in enumerate(bits):
                    for bit in range(8):
                        if byte >> bit & 1:
                            lines[relative, index * 8 + bit].add(test)
    if not lines:
        raise RuntimeError(f"no test executes a line of {part}: coverage looks at other files")
    return {line: _in_turn(tests, durations) for line, tests in lines.items()}


def _in_turn(tests: set[str], durations: dict[str, float]) -> list[str]:
    """The quickest first, but one of each function before the next of any: else the many cases of one test
    are all that runs."""
    found: Counter[str] = Counter()
    turns: list[tuple[int, int, str]] = []
    for test in sorted(tests, key=lambda test: (durations.get(test, 0.0), test)):
        function = test.partition("[")[0]
        turns.append((found[function], len(turns), test))
        found[function] += 1
    return [test for _, _, test in sorted(turns)]


def _durations(output: str) -> dict[str, float]:
    found = {}
    for line in output.splitlines():
        words = line.split(maxsplit=2)
        if len(words) == 3 and words[1] == "call" and words[0].endswith("s"):
            found[words[2].strip()] = float(words[0][:-1])
    return found


def _pytest(
    tree: Path, words: list[str], *, seconds_max: float, **environ: str
) -> subprocess.CompletedProcess[str]:
    # The run without a mutation keeps its bytecode for the others. A mutated file is newer than its own.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", FAST, "--hypothesis-seed=1"]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", *words]
    return subprocess.run(  # noqa: S603 - the interpreter that runs this script
        command,
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=seconds_max,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **environ},
    )


def caught(tree: Path, one: Mutation, tests: list[str]) -> bool:
    """Whether a test fails, or all hang, with this mutation in the tree; the tree is as before afterwards."""
    file = tree / one.path
    before = file.read_bytes()
    lines = before.split(b"\n")
    line = lines[one.line - 1]
    lines[one.line - 1] = line[: one.begin] + one.text.encode() + line[one.end :]
    file.write_bytes(b"\n".join(lines))
    try:
        return _pytest(tree, tests[:TESTS_MAX], seconds_max=RUN_S_MAX).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_bytes(before)


def shown(one: Mutation) -> str:
    """The line with its mutation."""
    line = (ROOT / one.path).read_bytes().split(b"\n")[one.line - 1]
    was, rest = line[one.begin : one.end].decode(), line.decode().strip()
    return f"{one.path}:{one.line}: {was!r} -> {one.text!r}   in: {rest}"


def main() -> int:
    """Sample, run, print survivors; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", help="a room of router/, or a path such as publisher/pool")
    parser.add_argument("--sample", type=int, default=40, help="mutations to make (default 40)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default 1)")
    parser.add_argument("--list", action="store_true", help="only show the sample")
    options = parser.parse_args()
    part = options.part.strip("/")
    if not (ROOT / part).exists():
        part = f"router/{part}"
    if not ((ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file()):
        parser.error(
            f"{options.part}: no such part; name a folder or module of router/, publisher/ or connectors/"
        )
    chosen = sample(part, options.sample, options.seed)
    if options.list:
        print(*map(shown, chosen), sep="\n")
        return 0
    own = ROOT / "tests" / part
    through = [
        f"tests/{name if '/' in name else f'router/app/test_{name}.py'}" for name in EXTRA_TESTS.get(part, ())
    ]
    paths = [path for path in (f"tests/{part}", *through) if (ROOT / path).exists()]
    if not paths:
        parser.error(f"{own}: {part} has no tests of its own")
    with tempfile.TemporaryDirectory(prefix="kvatlas-power-") as folder:
        tree = Path(folder).resolve()
        shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_COPIED, dirs_exist_ok=True)
        executed = tests_by_line(tree, part, paths)
        survivors = []
        for number, one in enumerate(chosen, start=1):
            tests = executed.get((one.path, one.line), [])
            dead = bool(tests) and caught(tree, one, tests)
            if not dead:
                survivors.append(one)
                print(f"survives{'' if tests else ' (no test executes the line)'}: {shown(one)}", flush=True)
            elif number % 10 == 0:
                print(f"{number} of {len(chosen)} tried", flush=True)
    found = len(chosen) - len(survivors)
    share = found / max(1, len(chosen))
    print(f"{part}: {found} of {len(chosen)} mutations caught ({share:.0%}), seed {options.seed}")
    return 0 if share >= CAUGHT_SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
