"""The access log: what a line says, what it does not say, and what happens when lines cannot be written."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.block_hash import NO_EXTRAS, MultimodalItem, PromptExtras
from router.observe.access_log import Access, AccessLog, AccessLogSettings
from router.observe.prefix_ids import UNIT_TOKENS, prefix_ids, read_key
from tests.support.waiting import wait_until

KEY = bytes(32)


def access(tokens: int = 700, **changes: Any) -> Access:
    fields: dict[str, Any] = {
        "arrived_s": 1000.5,
        "model": "m",
        "engine_id": "http://e:1",
        "tokens": array("q", range(tokens)),
        "extras": NO_EXTRAS,
        "streams": True,
        "output_tokens": 7,
        "predicted_tokens": 512,
        "cached_tokens": 256,
        "ttft_s": 0.25,
        "duration_s": 1.0,
        "queue_s": 0.125,
    }
    return Access(**{**fields, **changes})


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(path: Path, **changes: Any) -> AccessLogSettings:
    return AccessLogSettings(path=str(path), **changes)


def write(log: AccessLog, *accesses: Access) -> None:
    log.start()
    for one in accesses:
        log.add(one)
    log.close()


def test_a_line_is_a_request_of_the_workload_format_with_what_the_router_knew(tmp_path: Path) -> None:
    log = AccessLog(settings(tmp_path / "a.jsonl"))
    write(log, access(), access(output_tokens=None, ttft_s=None))
    log.skip()
    first, second = written(tmp_path / "a.jsonl")
    ids = first.pop("hash_ids")
    assert len(ids) == 2
    assert all(0 <= one < 1 << 53 for one in ids)
    assert first == {
        "timestamp": 1000500.0,
        "input_length": 700,
        "output_length": 7,
        "model": "m",
        "engine": "http://e:1",
        "stream": True,
        "output_reported": True,
        "predicted_tokens": 512,
        "cached_tokens": 256,
        "ttft_s": 0.25,
        "duration_s": 1.0,
        "queue_s": 0.125,
    }
    assert (second["output_length"], second["output_reported"], second["ttft_s"]) == (0, False, None)
    assert (log.stats.written, log.stats.dropped["tokens_unknown"]) == (2, 1)


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(2):
        write(AccessLog(settings(path)), access())
    first, second = written(path)
    assert first["hash_ids"] == second["hash_ids"]
    assert (tmp_path / "a.jsonl.key").stat().st_mode & 0o777 == 0o600
    elsewhere = tmp_path / "b.jsonl"
    write(AccessLog(settings(elsewhere)), access())
    assert not set(written(elsewhere)[0]["hash_ids"]) & set(first["hash_ids"])


def test_a_spoilt_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not a key")
    with pytest.raises(OSError, match="32 bytes in hexadecimal"):
        read_key(tmp_path / "key")


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).flatmap(
    lambda units: st.integers(1, UNIT_TOKENS).map(lambda tail: (units, tail))
)


def tokens_of(prompt: tuple[list[int], int]) -> array[int]:
    units, tail = prompt
    return array(
        "q", [unit for unit in units for _ in range(UNIT_TOKENS)][: UNIT_TOKENS * (len(units) - 1) + tail]
    )


@given(prompts, prompts)
def test_ids_are_equal_exactly_where_the_prefixes_are(one: Any, other: Any) -> None:
    left, right = tokens_of(one), tokens_of(other)
    ids = [prefix_ids(tokens, "m", NO_EXTRAS, KEY) for tokens in (left, right)]
    for index, (a, b) in enumerate(zip(*ids, strict=False)):
        end = UNIT_TOKENS * (index + 1)
        assert (a == b) == (left[:end] == right[:end])


def test_adapter_salt_model_and_images_tell_prefixes_apart() -> None:
    tokens = array("q", range(2 * UNIT_TOKENS))
    plain = prefix_ids(tokens, "m", NO_EXTRAS, KEY)
    for extras in (PromptExtras(lora_name="a"), PromptExtras(cache_salt="s")):
        assert not set(plain) & set(prefix_ids(tokens, "m", extras, KEY))
    assert not set(plain) & set(prefix_ids(tokens, "other", NO_EXTRAS, KEY))
    image = PromptExtras(multimodal=(MultimodalItem("cat", UNIT_TOKENS + 5, 3),))
    with_image = prefix_ids(tokens, "m", image, KEY)
    assert with_image[0] == plain[0], "before the image nothing differs"
    assert with_image[1] != plain[1]


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    log = AccessLog(settings(tmp_path / "a.jsonl", queue_len_max=2))
    write_before_start = [access() for _ in range(5)]
    for one in write_before_start:
        log.add(one)
    assert log.stats.dropped["queue_full"] == 3
    log.start()
    log.close()
    assert len(written(tmp_path / "a.jsonl")) == log.stats.written == 2


def test_the_tokens_that_wait_are_bounded(tmp_path: Path) -> None:
    log = AccessLog(settings(tmp_path / "a.jsonl", queue_tokens_max=1000))
    log.add(access(tokens=600))
    log.add(access(tokens=600))
    assert log.stats.dropped["queue_full"] == 1
    log.start()
    log.close()
    log.add(access(tokens=600))
    assert log.stats.dropped["queue_full"] == 1, "what was written makes room"


def test_what_clients_choose_counts_among_what_waits(tmp_path: Path) -> None:
    log = AccessLog(settings(tmp_path / "a.jsonl", queue_tokens_max=1000))
    log.add(access(tokens=1, extras=PromptExtras(cache_salt="s" * 2000)))
    assert log.stats.dropped["queue_full"] == 1


def test_the_files_are_for_their_owners_eyes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = AccessLog(settings(path, bytes_max=4000))
    write(log, *(access() for _ in range(20)))
    assert log.stats.rotations
    for file in (path, Path(f"{path}.1"), Path(f"{path}.key")):
        assert file.stat().st_mode & 0o777 == 0o600


def test_the_files_turn_over_within_their_bound(tmp_path: Path) -> None:
    path, bytes_max = tmp_path / "a.jsonl", 4000
    log = AccessLog(settings(path, bytes_max=bytes_max))
    write(log, *[access(output_tokens=number) for number in range(100)])
    older = Path(f"{path}.1")
    assert log.stats.rotations > 1
    assert path.stat().st_size + older.stat().st_size <= bytes_max
    numbers = [line["output_length"] for line in written(older) + written(path)]
    assert numbers == list(range(100 - len(numbers), 100)), "the latest lines, in order"


def test_half_a_line_left_by_a_crash_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 1}\n{"timest')
    write(AccessLog(settings(path)), access())
    assert [line["timestamp"] for line in written(path)] == [1, 1000500.0]


def test_a_disk_that_refuses_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "a.jsonl"
    log = AccessLog(settings(path))
    write(log, access(), access())
    assert log.stats.dropped["not_writable"] == 2
    assert log.stats.written == 0
    path.parent.mkdir()
    write(log, access())
    assert log.stats.written == 1


def test_lines_are_written_without_waiting_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = AccessLog(settings(path))
    log.start()
    try:
        log.add(access())
        wait_until(lambda: log.stats.written, "written")
        assert len(written(path)) == 1
    finally:
        log.close()
