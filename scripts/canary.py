"""Runs a release of vLLM or SGLang against what kvatlas knows of engines, and prints what differs.

    python scripts/canary.py VERSION [--engine sglang] [--mixes 100] [--seed 1]

Of vLLM the Python of the release is put over the compiled modules that scripts/vllm_env.sh installs
(scripts/vllm_overlay_env.sh), and the tests of tests/vllm run on it: random mixes and traffic through its
scheduler, block pool and hit rules, its templates and frontends, a sweep of values, the frames that its
publisher sends. Of SGLang the wheel is downloaded, and the tests of ``make test-sglang`` run on it:
random mixes through its caches, with windows and states too, its frames, loads and chats; and its sources are
searched for the names of arguments, fields and gauges that kvatlas reads. The fields of the release's events
are compared with those that kvatlas decodes. A row that differs is not a fault of the release: it is what
kvatlas must learn or refuse before that release is in use. Status 1 if any row differs.
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
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored

ROOT = Path(__file__).resolve().parent.parent
_SGLANG_EVENTS = "tests/publisher/test_sglang_events.py"
TESTS = {
    "vllm": {
        "random mixes": ["tests/vllm/test_random_mixes.py"],
        "hit rules": ["tests/vllm/test_hit_rules_match_scheduler.py"],
        "block pool": ["tests/vllm/test_pool_matches_vllm.py"],
        "prompts in flight": ["tests/vllm/test_prompts_in_flight.py"],
        "frames": ["tests/vllm/test_zmq_publisher_compat.py"],
        "templates": ["tests/vllm/test_prompts_match_vllm.py", "tests/vllm/test_families_match_vllm.py"],
        "values": ["tests/vllm/test_value_sweep.py"],
        "rust frontend": ["tests/vllm/test_rust_frontend.py"],
    },
    "sglang": {
        "frames": [_SGLANG_EVENTS, "-k", "stored_pages or removals or media"],
        "loads": [_SGLANG_EVENTS, "-k", "loads"],
        "radix tree": [_SGLANG_EVENTS, "-k", "radix_tree"],
        "what events tell": [_SGLANG_EVENTS, "-k", "full_attention_part"],
        "windows, states": [_SGLANG_EVENTS, "-k", "rules_for_windows"],
        "chats": ["tests/router/prompts/test_sglang_chats.py"],
    },
}
"""Arguments of pytest by row of the table."""
SGLANG_NAMES = tuple(
    word
    for line in (
        "attn_dp_rank cached_tokens chunked_prefill_size disable_overlap_schedule enable_cache_report",
        "dp_size enable_flexkv enable_hierarchical_cache enable_lmcache enable_lora endpoint_port_base",
        "enable_unified_cache_external_linker hicache_storage_backend internal_states kv_events",
        "kv_events_config load_endpoint_port_base load_topic mamba_max_states_per_path memory_usage",
        "mamba_radix_cache_strategy max_mamba_cache_size replay_endpoint_port_base speculative_algorithm",
        "token_capacity_swa uses_mamba_radix_cache sglang:num_queue_reqs sglang:num_running_reqs",
        "sglang:token_usage endpoint_host token_capacity page_size",
    )
    for word in line.split()
)
"""Names in SGLang's sources that kvatlas reads: fields of ``/server_info`` and of events, gauges."""
_TEST_S_MAX = 1200
_WHY_CHARS_MAX = 110
_ERROR = re.compile(r"^E +(\w+(?:Error|Exception): .*)$", re.MULTILINE)
_FIELDS = """
import json, msgspec, vllm.distributed.kv_events as events
found = [one for one in vars(events).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
print(json.dumps({one.__name__: list(one.__struct_fields__) for one in found}))
"""
_SGLANG_FIELDS = """
import json, msgspec
from tests.support.sglang_wire import classes
kinds = [one for one in vars(classes("wheel")).values() if isinstance(one, type)]
found = [one for one in kinds if issubclass(one, msgspec.Struct)]
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


def sglang_wheel(version: str) -> tuple[str, str]:
    """Path of this release's wheel, or "" and why there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvatlas", f"sglang-{version}")
    if not (found := sorted(folder.glob("*.whl"))):
        words = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
        ]
        words += ["--dest", str(folder), f"sglang=={version}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            return "", (done.stderr.strip().splitlines() or ["no reason"])[-1]
        found = sorted(folder.glob("*.whl"))
    return (str(found[0]), "") if found else ("", "it has no wheel")


def names(wheel: str) -> Row:
    """Look for the names that are read in the sources of SGLang."""
    left = set(SGLANG_NAMES)
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith("sglang/srt/") and name.endswith(".py"):
                text = files.read(name).decode(errors="replace")
                left -= {one for one in left if one in text}
    gone = tuple(f"{name} is gone" for name in sorted(left))
    return Row("names", len(SGLANG_NAMES) - len(gone), 0, gone)


def event_fields(words: list[str], environ: dict[str, str], folder: str | Path) -> Row:
    """Compare the fields of the release's events with those that are decoded here; ``words`` print them."""
    done = subprocess.run(  # noqa: S603
        words, capture_output=True, text=True, check=False, cwd=folder, env=os.environ | environ
    )
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
        elif not name.endswith(("Batch", "KVCacheEvent", "OffloadedState")):
            differs.append(f"event {name} is unknown")
    differs += [f"event {name} is gone" for name in known.keys() - theirs.keys()]
    return passed, 0, tuple(differs)


def tested(name: str, files: list[str], environ: dict[str, str], options: argparse.Namespace) -> Row:
    """Run these tests on the release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-q", "-n", "0", "--timeout", str(_TEST_S_MAX), "--junitxml", str(report)]
        words += ["-p", "no:cacheprovider", f"--randomly-seed={options.seed}"]
        if options.engine == "vllm":
            # Of a test with a variant for each installed release, the one for the newest.
            words += ["-m", "vllm", "-k", "not 0.32"]
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pytest", *words, *files],
            cwd=ROOT,
            env=os.environ | environ,
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


def prepared(options: argparse.Namespace) -> tuple[dict[str, str], list[Row]]:
    """Install the release: variables of its tests, none if it cannot be, and the rows so far."""
    vllm = options.engine == "vllm"
    found, why = environment(options.version) if vllm else sglang_wheel(options.version)
    python = found if vllm else vllm_python()
    if not vllm and found and not python:
        found, why = "", "scripts/vllm_env.sh made no environment with torch"
    rows = [Row("environment", bool(found), 0, (why,) if why else ())]
    if not found:
        return {}, rows
    environ = {
        "KVATLAS_VLLM_PYTHON": python,
        "KVATLAS_VLLM_033_PYTHON": python,
        "KVATLAS_VLLM_NEXT": options.version,
        "KVATLAS_RANDOM_MIXES": str(options.mixes),
        "KVATLAS_RANDOM_SEED": str(options.seed),
    }
    if vllm:
        return environ, [*rows, event_fields([python, "-c", _FIELDS], environ, "/")]
    environ = {"KVATLAS_VLLM_PYTHON": python, "KVATLAS_SGLANG_WHEEL": found}
    fields = event_fields([sys.executable, "-c", _SGLANG_FIELDS], environ, ROOT)
    return environ, [*rows, fields, names(found)]


def vllm_python() -> str:
    """Interpreter with torch; "": none could be made."""
    done = subprocess.run(  # noqa: S603
        [str(ROOT / "scripts" / "vllm_env.sh")], stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="as in the package registry: 0.33.0")
    parser.add_argument("--engine", choices=sorted(TESTS), default="vllm")
    parser.add_argument("--mixes", type=int, default=100, help="of vLLM")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one row")
    options = parser.parse_args()
    tests = TESTS[options.engine]
    if options.only not in {None, *tests}:
        parser.error(f"argument --only: {options.only!r} is none of {', '.join(tests)}")
    environ, rows = prepared(options)
    for name, files in tests.items() if environ else ():
        if options.only in (None, name):
            print(f"canary: {name}", file=sys.stderr)
            rows.append(tested(name, files, environ, options))
    print(f"{'vLLM' if options.engine == 'vllm' else 'SGLang'} {options.version}")
    print("\n".join(table(rows)))
    return int(any(row.differs for row in rows))


if __name__ == "__main__":
    sys.exit(main())
