"""Recorded truth of real vLLM: every hit predicted as its scheduler found it, every residency count equal."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.router.tools.trace_verification import verify_trace
from tests.support.paths import TRACES


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_every_probe_and_count_is_exact(path: Path) -> None:
    result = verify_trace(path)
    assert (result.over, result.under, result.exact) == (0, 0, result.probes)
    assert result.states_exact == result.states
    assert result.all_exact
    assert result.probes >= 20


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_nothing_is_promised_or_denied_before_it_is_known(path: Path) -> None:
    """Each probe from the events before it: exact, or said to be unknown."""
    result = verify_trace(path, cold=True)
    assert (result.over, result.under) == (0, 0)
    assert result.exact == result.probes - result.unknown
    assert result.unknown <= result.probes * 0.4


def test_no_family_is_missing() -> None:
    assert len({path.name.split(".")[0] for path in TRACES}) == 53


def _without_removals(batch: bytes) -> bytes:
    """A batch whose removals are of an unknown type."""
    return batch.replace(b"BlockRemoved", b"BlockRemoveX")


def _without_one_group(batch: bytes) -> bytes:
    """A batch in which the stores of group 0 are of an unknown type."""
    marker = b"group_idx\x00"
    head, *events = batch.split(b"\xabBlockStored")
    return head + b"".join(
        (b"\xabBlockStoreX" if marker in event else b"\xabBlockStored") + event for event in events
    )


@pytest.mark.parametrize(
    ("name", "change"), [("full_attn_evict.1", _without_removals), ("retention_0.1", _without_one_group)]
)
def test_events_that_are_left_out_show(tmp_path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """The comparison can fail: without some of its events a trace is not exact."""
    source = next(path for path in TRACES if path.name.startswith(name))
    changed = tmp_path / source.name
    with gzip.open(source, "rt") as lines, gzip.open(changed, "wt") as out:
        for line in lines:
            entry = json.loads(line)
            if "events" in entry:
                entry["events"] = base64.b64encode(change(base64.b64decode(entry["events"]))).decode()
            out.write(json.dumps(entry) + "\n")
    result = verify_trace(changed)
    assert result.exact < result.probes
