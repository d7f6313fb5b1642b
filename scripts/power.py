"""Measures the power of tests: how many one-line mutations of a part its own fast tests catch.

    python scripts/power.py placement [--sample 40] [--seed 1] [--list]

A fixed sample of mutations is drawn from the lines of ``router/PART`` (or ``publisher/PART``,
``connectors/PART``): a change of the code changes only the mutations of the changed lines. The part's tests
run once with coverage, which tells the tests that execute a line; then the tests of each mutation's line run
with it until one fails. What no test notices is printed with its line: it shows a missing test or dead code.
Exit status 1 if less than ``CAUGHT_SHARE_MIN`` are caught.

The tests are imported once. Each mutation is made in a fork of that process, where functions get the code of
the changed line: a second or less, where a process of its own takes ten to import.

mutmut and cosmic-ray mutate whole modules; neither draws a sample of a part that stays the same while other
lines change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import os
import pickle
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple, TypeVar

import coverage
import pytest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
CAUGHT_SHARE_MIN = 0.85
RUN_S_MAX = 120.0
"""Of the tests of one mutation; one that makes them hang is caught."""
TESTS_MAX = 60
"""Of one mutation: the tests that execute its line, those of the file of its module's name first, then the
quickest of each function."""
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
        "concurrency",
        "router/proxy/test_leaving_streams.py",
        "router/proxy/test_continued_streams.py",
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
        "chosen_engines",
        "router/http/test_limits.py",
    ],
    "router/pd": ["split_failures", "prefill_decode"],
    "router/feeds": ["recovery", "late_events", "followed_stores"],
    "router/openai": [
        "client_numbers",
        "work_of_requests",
        "context_lengths",
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
        "engine_probe",
        "estimates",
        "found_facts",
        "keys",
        "queue",
        "reload",
        "request_metrics",
        "service_levels",
        "sessions",
        "sources",
        "router/http/test_cors.py",
        "router/workers/test_merged_view.py",
    ],
    "router/config": ["router/api/test_ops_port.py", "router/cli/test_command_line.py"],
    "router/fleet": ["engines", "scaling", "reload", "sources", "isolation_proof"],
    "router/http": ["router/proxy/test_deaths.py", "router/services/epp/test_exchange.py"],
    "router/observe": ["usage", "traces", "cache_funnel", "sessions", "request_metrics"],
    "publisher/pool": [
        "sglang",
        "publisher/simulator/test_pull.py",
        "publisher/test_sglang_events.py",
        "connectors/tier/test_policies.py",
        "router/simulation/test_tiers.py",
        "router/index/test_sglang.py",
    ],
    "publisher/simulator": [
        "sglang",
        "agent_apis",
        "prefill_decode",
        "connectors",
        "rights",
        "router/simulation/demo/test_baseline.py",
    ],
    "router/tools": ["router/admission/test_key_file.py"],
    "router/index": [
        "exact",
        "found_facts",
        "offloaded",
        "assumed",
        "sessions",
        "router/feeds/test_store_events.py",
    ],
    "connectors/tier": ["connectors/store/test_store_tier.py", "connectors/offload"],
    "connectors/worker": [
        "connectors/offload/test_offload_parts.py",
        "connectors/offload/test_protocol_model.py",
    ],
    "connectors/scheduler": ["connectors/offload", "connectors/multi", "connectors/hits"],
    "router/prompts": ["frontends", "images", "token_ids"],
}
"""Files ``tests/router/app/test_NAME.py``, or others below ``tests``, that show the work of a part through
what uses it."""

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


@cache
def _source(path: str) -> bytes:
    """A module as it was at first: the tree may change meanwhile."""
    return (ROOT / path).read_bytes()


def mutations(path: str) -> dict[Mutation, str]:
    """One-line mutations of the functions of a module, each with the name of the innermost function."""
    found: dict[Mutation, str] = {}
    tree = ast.parse(_source(path))
    for function in ast.walk(tree):
        # What looks for contradictions finds none in right code.
        if (
            isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and function.name != "check_integrity"
        ):
            for statement in function.body:
                for node in _walk(statement):
                    found |= dict.fromkeys(_of_node(path, node), function.name)
    return found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without annotations, which nothing evaluates, ``strict`` of ``zip``, which
    guards what no caller does, and pauses for other tasks, whose number nothing depends on."""
    if _is_pause(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns"}:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST) and getattr(inner, "arg", None) != "strict":
                    yield from _walk(inner)


def _is_pause(node: ast.AST) -> bool:
    """``yield`` or ``await asyncio.sleep(0)`` as a statement, with its condition."""
    match node:
        case ast.If(_, [only], []):
            return _is_pause(only)
        case ast.Expr(ast.Yield(None)):
            return True
        case ast.Expr(ast.Await(ast.Call(function, [ast.Constant(0)], []))):
            return ast.unparse(function) == "asyncio.sleep"
    return False


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
            yield f"False and ({ast.unparse(call)})"
        case ast.Expr(ast.Await(ast.Call()) as awaited):
            yield f"False and ({ast.unparse(awaited)})"
        case ast.AugAssign():
            yield f"if False: {ast.unparse(node)}"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield str(value + 1)
        case _:
            return


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str | bytes)


def sample(part: str, count: int, seed: int) -> list[Mutation]:
    """``count`` mutations of the part, one of a line at most. A mutation's place is a hash of the seed, its
    path, function and line, and the change: edits of other lines leave it where it is."""
    first: dict[tuple[str, int], tuple[bytes, Mutation]] = {}
    equals: Counter[tuple[object, ...]] = Counter()
    for path in (file.relative_to(ROOT).as_posix() for file in _files(part)):
        lines = _source(path).split(b"\n")
        for one, function in sorted(mutations(path).items()):
            line = lines[one.line - 1]
            change = (seed, path, function, line.strip(), line[one.begin : one.end], one.text)
            equals[change] += 1
            place = sha256(repr((change, equals[change])).encode()).digest()
            first[path, one.line] = min(first.get((path, one.line), (place, one)), (place, one))
    return [one for _, one in sorted(first.values())[:count]]


def _files(part: str) -> list[Path]:
    folder = ROOT / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


class Child:
    """Work in a fork of this process: tests run there, and leave nothing here."""

    @staticmethod
    def result(work: Callable[[], T], seconds_max: float) -> T:
        """The result of ``work`` in a fork; raises ``TimeoutError`` after ``seconds_max``, ``RuntimeError``
        if it raises or ends the process."""
        told, tell = os.pipe()
        pid = os.fork()
        if not pid:
            Child._work(work, tell)
        os.close(tell)
        said = bytearray()
        try:
            until_s = time.monotonic() + seconds_max
            # Not until its end: what a test has left may hold the other side of the pipe.
            while len(said) < 8 or len(said) < 8 + int.from_bytes(said[:8]):
                if not select.select([told], [], [], max(0.0, until_s - time.monotonic()))[0]:
                    raise TimeoutError
                if not (piece := os.read(told, 1 << 16)):
                    raise RuntimeError("the process of the tests ended")
                said += piece
        finally:
            os.close(told)
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found, error = pickle.loads(said[8:])  # noqa: S301 - from the fork
        if error:
            raise RuntimeError(error)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def _work(work: Callable[[], object], tell: int) -> None:
        found, error = None, ""
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            found = work()
        except BaseException:  # noqa: BLE001 - no code of the parent may run here
            error = traceback.format_exc()
        with open(tell, "wb") as pipe:
            said = pickle.dumps((found, error))
            pipe.write(len(said).to_bytes(8) + said)
        os._exit(0)


class Runner:
    """Plugin of pytest that runs the tests of mutations instead of all tests; ``survivors`` is the result."""

    def __init__(self, part: str, chosen: list[Mutation]) -> None:
        self._part, self._chosen = part, chosen
        self._failed: list[str] = []
        self.survivors: list[Mutation] = []
        self.impossible: list[Mutation] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure, in a fork."""
        if report.failed:
            self._failed.append(f"{report.nodeid}: {report.longreprtext[-2000:]}")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try each mutation. Raises ``RuntimeError`` if a test fails without one or none executes a line."""
        items = {item.nodeid: item for item in session.items}
        for path in {one.path for one in self._chosen}:
            # Commands import their modules when they are called: in a fork it would be too late.
            with contextlib.suppress(ImportError):
                importlib.import_module("kvatlas." + path.removesuffix(".py").replace("/", "."))
        gc.unfreeze()
        functions: dict[str, list[FunctionType]] = defaultdict(list)
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                functions[os.path.realpath(one.__code__.co_filename)].append(one)
        gc.freeze()
        executed = Child.result(lambda: self._tests_by_line(list(items.values())), 3600)
        for number, mutation in enumerate(self._chosen, start=1):
            names = executed.get((mutation.path, mutation.line), [])
            if not self._caught(mutation, [items[name] for name in names[:TESTS_MAX]], functions):
                self.survivors.append(mutation)
                print(
                    f"survives{'' if names else ' (no test executes the line)'}: {shown(mutation)}",
                    flush=True,
                )
            elif number % 10 == 0:
                print(f"{number} of {len(self._chosen)} tried", flush=True)
        return True

    def _caught(
        self, one: Mutation, items: list[pytest.Item], functions: dict[str, list[FunctionType]]
    ) -> bool:
        """Whether a test fails, or all hang, with this mutation."""

        def tried() -> bool:
            apply(one, functions[str(ROOT / one.path)])
            return any(self._fails(item, after) for item, after in _with_next(items))

        try:
            return bool(items) and Child.result(tried, RUN_S_MAX)
        except TimeoutError:
            return True
        except RuntimeError as error:
            if "free vars" not in str(error):  # of the test's process: it ended, or could not go on
                return True
            self.impossible.append(one)
            return True

    def _fails(self, item: pytest.Item, after: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
        if self._failed and after is not None:
            item.session._setupstate.teardown_exact(None)  # noqa: SLF001 - servers of its fixtures end
        return bool(self._failed)

    def _tests_by_line(self, items: list[pytest.Item]) -> dict[tuple[str, int], list[str]]:
        """Tests that execute each line of the part, in the order in which to try them."""
        source = ROOT / self._part
        measured = coverage.Coverage(
            data_file=None, source=[str(source if source.is_dir() else source.parent)], config_file=False
        )
        measured.set_option(
            "run:disable_warnings", ["module-not-measured", "no-data-collected", "trace-changed"]
        )
        lasted: dict[str, float] = {}
        measured.start()
        for item, after in _with_next(items):
            if sys.gettrace() is None:
                # A test that counts steps may leave none: all after it would execute nothing.
                measured.stop()
                measured.start()
            measured.switch_context(item.nodeid)
            began = time.perf_counter()
            if self._fails(item, after):
                raise RuntimeError(f"a test fails without a mutation: {self._failed[0]}")
            lasted[item.nodeid] = time.perf_counter() - began
        measured.stop()
        data = measured.get_data()
        lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        for path in data.measured_files():
            for line, contexts in data.contexts_by_lineno(path).items():
                lines[Path(path).relative_to(ROOT).as_posix(), line].update(filter(None, contexts))
        if not lines:
            raise RuntimeError(f"no test executes a line of {self._part}: coverage looks at other files")
        return {line: _in_turn(tests, lasted, Path(line[0]).stem) for line, tests in lines.items()}


def _with_next(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def _in_turn(tests: set[str], lasted: dict[str, float], module: str) -> list[str]:
    """Those of the module's own file first, then the quickest, but one of each function before the next of
    any: else the many cases of one test are all that runs."""
    found: Counter[str] = Counter()
    turns: list[tuple[int, bool, int, str]] = []
    for test in sorted(tests, key=lambda test: (lasted.get(test, 0.0), test)):
        function = test.partition("[")[0]
        turns.append((found[function], f"/test_{module}.py::" not in test, len(turns), test))
        found[function] += 1
    return [test for *_, test in sorted(turns)]


def apply(one: Mutation, functions: list[FunctionType]) -> None:
    """Give the functions of its module the code that they have with this mutation. Raises ``ValueError``
    where the change takes a name from a function that is made already ("free vars"), or none is there."""
    lines = _source(one.path).split(b"\n")
    line = lines[one.line - 1]
    lines[one.line - 1] = line[: one.begin] + one.text.encode() + line[one.end :]
    changed: dict[tuple[str, int], list[CodeType]] = defaultdict(list)
    for code in _codes(compile(b"\n".join(lines), one.path, "exec", dont_inherit=True)):
        changed[code.co_qualname, code.co_firstlineno].append(code)
    made = 0
    for function in functions:
        was = function.__code__
        found = changed.get((was.co_qualname, was.co_firstlineno), [])
        if len(found) == 1 and found[0] != was:
            function.__code__ = found[0].replace(co_filename=was.co_filename)
            made += 1
    if not made:
        raise ValueError("no function has this line; a change of free vars, or its module was not imported")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def shown(one: Mutation) -> str:
    """The line with its mutation."""
    line = _source(one.path).split(b"\n")[one.line - 1]
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
    # Ended by another, as by timeout(1), it ends its fork too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    runner = Runner(part, chosen)
    words = ["-q", "-s", "-m", FAST, "--hypothesis-seed=1", "--no-header", "--no-summary"]
    status = pytest.main([*words, "-p", "no:randomly", "-p", "no:cacheprovider", *paths], plugins=[runner])
    if status:
        return int(status)
    for one in runner.impossible:
        print(f"counts as caught, for it cannot be made in a process that runs: {shown(one)}")
    found = len(chosen) - len(runner.survivors)
    share = found / max(1, len(chosen))
    print(f"{part}: {found} of {len(chosen)} mutations caught ({share:.0%}), seed {options.seed}")
    return 0 if share >= CAUGHT_SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
