"""Runs a vLLM release against what kvatlas knows of engines, and prints what differs.

    python scripts/canary.py VERSION [--mixes 100] [--seed 1]

The Python of the release is put over the compiled modules that scripts/vllm_env.sh installs
(scripts/vllm_overlay_env.sh), and the tests of tests/vllm run on it: random mixes and traffic through its
scheduler, block pool and hit rules, its templates and frontends, a sweep of values, the frames that its
publisher sends. The fields of its events are compared with those that kvatlas decodes. A row that differs is
not a fault of the release: it is what kvatlas must learn or refuse before that release is in use. Status 1 if
any row differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "random mixes": ["test_random_mixes.py"],
    "hit rules": ["test_hit_rules_match_scheduler.py"],
    "block pool": ["test_pool_matches_vllm.py"],
    "prompts in flight": ["test_prompts_in_flight.py"],
    "frames": ["test_zmq_publisher_compat.py"],
    "templates": ["test_prompts_match_vllm.py", "test_families_match_vllm.py"],
    "values": ["test_value_sweep.py"],
    "rust frontend": ["test_rust_frontend.py"],
}
"""Files of tests/vllm by row of the table."""
_TEST_S_MAX = 1200
_WHY_CHARS_MAX = 110
_ERROR = re.compile(r"^E +(\w+(?:Error|Exception): .*)$", re.MULTILINE)
_FIELDS = """
import json, msgspec, vllm.distributed.kv_events as events
found = [one for one in vars(events).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
print(json.dumps({one.__name__: list(one.__struct_fields__) for one in found}))
"""


class Row(NamedTuple):
    """Counts of one kind of check; ``differs``: what was not as kvatlas expects, one line for each."""

    name: str
    passed: int
    skipped: int
    differs: tuple[str, ...]


def environment(version: str) -> tuple[str, str]:
    """Interpreter with this release, or "" and why there is none."""
    words = [str(ROOT / "scripts" / "vllm_overlay_env.sh"), version]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    lines = done.stderr.strip().splitlines()
    return (done.stdout.strip(), "") if done.returncode == 0 else ("", lines[-1] if lines else "no reason")


def event_fields(python: str) -> Row:
    """Compare the fields of the release's events with those that are decoded here."""
    words = [python, "-c", _FIELDS]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")  # noqa: S603
    if done.returncode:
        return Row("event fields", 0, 0, (done.stderr.strip().splitlines()[-1],))
    theirs: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return Row("event fields", *compared_fields(theirs))


def compared_fields(theirs: dict[str, list[str]]) -> tuple[int, int, tuple[str, ...]]:
    """Number of fields that are decoded, 0, and a line for each event or field that is unknown or gone."""
    passed, differs = 0, list[str]()
    known = {kind.__name__: kind.__struct_fields__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
    for name, fields in theirs.items():
        if name in known:
            new = [field for field in fields if field not in known[name]]
            passed += len(fields) - len(new)
            differs += [f"{name}.{field} is unknown" for field in new]
        elif not name.endswith(("Batch", "KVCacheEvent")):
            differs.append(f"event {name} is unknown")
    differs += [f"event {name} is gone" for name in known.keys() - theirs.keys()]
    return passed, 0, tuple(differs)


def tested(name: str, files: list[str], python: str, options: argparse.Namespace) -> Row:
    """Run these files of tests/vllm on the release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-m", "vllm", "-q", "--timeout", str(_TEST_S_MAX), "--junitxml", str(report)]
        # Of a test with a variant for each installed release, the one for the newest.
        words += ["-k", "not 0.32", "-p", "no:cacheprovider", f"--randomly-seed={options.seed}"]
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pytest", *words, *(f"tests/vllm/{file}" for file in files)],
            cwd=ROOT,
            env=os.environ
            | {
                "KVATLAS_VLLM_PYTHON": python,
                "KVATLAS_VLLM_033_PYTHON": python,
                "KVATLAS_VLLM_NEXT": options.version,
                "KVATLAS_RANDOM_MIXES": str(options.mixes),
                "KVATLAS_RANDOM_SEED": str(options.seed),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not report.exists():
            return Row(name, 0, 0, (f"pytest ended with {done.returncode}: {done.stdout.strip()[-200:]}",))
        return Row(name, *results(ET.parse(report).getroot()))  # noqa: S314  # pytest has just written it


def results(report: ET.Element) -> tuple[int, int, tuple[str, ...]]:
    """Passed and skipped tests of pytest's report, and a line for each that failed."""
    passed, skipped, differs = 0, 0, list[str]()
    for case in report.iter("testcase"):
        bad = next((one for one in case if one.tag in {"failure", "error"}), None)
        if bad is not None:
            # Of a driver in another process its own error, which is quoted last.
            errors = _ERROR.findall(bad.text or "")
            said = " ".join((errors[-1] if errors else bad.get("message", "")).split())
            differs.append(f"{case.get('name')}: {said}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(differs)


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'check':<18} {'passed':>6} {'skipped':>7} {'differ':>6}  what differs"
    for row in rows:
        first, *more = [re.sub(r"\s+", " ", one)[:_WHY_CHARS_MAX] for one in row.differs] or [""]
        yield f"{row.name:<18} {row.passed:>6} {row.skipped:>7} {len(row.differs):>6}  {first}".rstrip()
        yield from (f"{'':<42}{one}" for one in more)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="of vLLM, as in the package registry: 0.33.0")
    parser.add_argument("--mixes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(TESTS), help="one row")
    options = parser.parse_args()
    python, why = environment(options.version)
    rows = [Row("environment", bool(python), 0, (why,) if why else ())]
    if python:
        rows.append(event_fields(python))
        for name, files in TESTS.items():
            if options.only in (None, name):
                print(f"canary: {name}", file=sys.stderr)
                rows.append(tested(name, files, python, options))
    print(f"vLLM {options.version}")
    print("\n".join(table(rows)))
    return int(any(row.differs for row in rows))


if __name__ == "__main__":
    sys.exit(main())
