"""The table of ``make canary``: what a release does otherwise than kvatlas expects."""

from __future__ import annotations

import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.scripts import script

canary = script("canary")
KNOWN = {
    kind.__name__: list(kind.__struct_fields__) for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def test_fields_and_events_that_are_not_decoded_are_named() -> None:
    assert canary.compared_fields(KNOWN)[2] == ()
    newer = {
        **KNOWN,
        "BlockStored": [*KNOWN["BlockStored"], "owner_id"],
        "BlockInactive": [],
        "KVEventBatch": [],
    }
    del newer["AllBlocksCleared"]
    assert canary.compared_fields(newer)[2] == (
        "BlockStored.owner_id is unknown",
        "event BlockInactive is unknown",
        "event AllBlocksCleared is gone",
    )


def test_each_failed_test_is_a_line() -> None:
    cases = (
        '<testcase name="a"/>',
        '<testcase name="b"><skipped/></testcase>',
        '<testcase name="c"><failure message="one&#10;two"/></testcase>',
        '<testcase name="d"><error message="gone">E   AssertionError: x&#10;E   ValueError: no mode&#10;E ok',
        "</error></testcase>",
    )
    report = ET.fromstring(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    row = canary.Row("frames", *canary.results(report))
    assert row == canary.Row("frames", 1, 1, ("c: one two", "d: ValueError: no mode"))
    lines = list(canary.table([row]))
    assert lines[1].split() == ["frames", "1", "1", "2", "c:", "one", "two"]
    assert lines[2].strip() == "d: ValueError: no mode"


def test_names_that_sglang_gave_up_are_named(tmp_path: Path) -> None:
    wheel = tmp_path / "sglang.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("sglang/srt/a.py", " ".join(canary.SGLANG_NAMES[2:]))
        files.writestr("sglang/README.md", " ".join(canary.SGLANG_NAMES))
    gone = tuple(f"{name} is gone" for name in canary.SGLANG_NAMES[:2])
    assert canary.names(str(wheel)) == canary.Row("names", len(canary.SGLANG_NAMES) - 2, 0, gone)
