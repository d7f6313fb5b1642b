"""The usage record: what a line says, what it does not say, and what happens when lines cannot be written."""

from __future__ import annotations

import json
import os
from array import array
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import NO_EXTRAS, MultimodalItem, PromptExtras
from kvatlas.router.observe.prefix_ids import UNIT_TOKENS, prefix_ids, read_key
from kvatlas.router.observe.requests import RequestRecord, RequestTracker
from kvatlas.router.observe.usage import (
    PlacementFacts,
    UsageLog,
    UsageSettings,
    rotated_files,
    usage_line,
)
from kvatlas.router.openai.request import Session, Usage
from tests.support.waiting import wait_until

KEY = bytes(32)
_FULL = Path("/dev/full")


def facts(tokens: int = 700, **changes: Any) -> PlacementFacts:
    known: dict[str, Any] = {
        "tokens": array("q", range(tokens)),
        "extras": NO_EXTRAS,
        "mode": "exact",
        "predicted_tokens": 512,
        "queue_s": 0.125,
        "predicted_ttft_s": 0.75,
    }
    return PlacementFacts(**{**known, **changes})


def record(known: PlacementFacts | None = None, usage: Usage | None = None, **changes: Any) -> RequestRecord:
    """A chat that was answered."""
    made = RequestTracker(lambda: 10.0).begin("POST", "/v1/chat/completions")
    made.placement_facts = lambda: facts() if known is None else known
    made.usage = Usage(700, 7, 256) if usage is None else usage
    made.model, made.engine, made.attempts, made.status = "m", "http://e:1", 1, 200
    made.streams, made.asked_s, made.first_s = True, 10.25, 10.5
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(path: Path, **changes: Any) -> UsageSettings:
    return UsageSettings(path=str(path), **changes)


def write(log: UsageLog, *records: RequestRecord) -> None:
    log.start()
    for one in records:
        log.add(one, 11.0)
    log.close()


def numbered(number: int) -> RequestRecord:
    return record(usage=Usage(700, number, 256))


def numbers(*files: Path) -> list[int]:
    return [line["generated_tokens"] for file in files for line in written(file)]


def test_a_line_has_who_what_where_tokens_and_times(tmp_path: Path) -> None:
    log = UsageLog(settings(tmp_path / "a.jsonl"))
    known = facts(host_tokens=128, store_tokens=64)
    write(
        log,
        record(
            known,
            tenant="acme",
            key_id="0123456789ab",
            request_id="r-1",
            session=Session("s-1", "a-1"),
            waited_s=0.1,
        ),
    )
    (line,) = written(tmp_path / "a.jsonl")
    assert len(line.pop("hash_ids")) == 2
    assert len(line.pop("start_ids")) == 16
    assert line.pop("arrived_s") > 1e9
    assert line == {
        "request_id": "r-1",
        "key": "0123456789ab",
        "tenant": "acme",
        "session": "s-1",
        "agent": "a-1",
        "model": "m",
        "method": "POST",
        "path": "/v1/chat/completions",
        "engine": "http://e:1",
        "prefill_engine": "",
        "attempts": 1,
        "status": 200,
        "outcome": "200",
        "stream": True,
        "prompt_tokens": 700,
        "cached_tokens": 256,
        "device_tokens": 256,
        "host_tokens": 0,
        "store_tokens": 0,
        "computed_tokens": 444,
        "generated_tokens": 7,
        "computed_is": "measured",
        "generated_is": "measured",
        "continued_from": "",
        "recomputed_tokens": 0,
        "predicted_tokens": 512,
        "mode": "exact",
        "verified": False,
        "waited_s": 0.1,
        "asked_s": 0.25,
        "first_token_s": 0.5,
        "duration_s": 1.0,
        "queue_s": 0.125,
        "predicted_ttft_s": 0.75,
        "hashed_tokens": 700,
    }


def test_a_request_that_reached_no_engine_has_a_line_too(tmp_path: Path) -> None:
    log = UsageLog(settings(tmp_path / "a.jsonl"))
    refused = RequestTracker(lambda: 10.0).begin("POST", "/v1/chat/completions")
    refused.status, refused.tenant = 429, "acme"
    gone = RequestTracker(lambda: 10.0).begin("GET", "/v1/x")
    gone.gone = True
    write(log, refused, gone)
    lines = written(tmp_path / "a.jsonl")
    assert [(line["status"], line["outcome"], line["tenant"]) for line in lines] == [
        (429, "429", "acme"),
        (0, "client_gone", ""),
    ]
    unknown = ("cached_tokens", "computed_tokens", "verified", "asked_s", "first_token_s", "hash_ids")
    assert all(line[name] is None for line in lines for name in unknown)


@pytest.mark.parametrize(
    ("predicted", "cached", "verified"), [(512, 512, True), (0, 0, True), (512, 0, False), (None, 5, None)]
)
def test_verified_says_whether_the_engine_reports_what_the_index_says(
    predicted: int | None, cached: int, verified: bool | None
) -> None:
    made = record(usage=Usage(700, 1, cached))
    assert usage_line(made, facts(predicted_tokens=predicted), 0.0, 1.0, KEY).verified is verified
    untold = record(usage=Usage(700, 1, None))
    partial = facts(predicted_tokens=predicted, mode="partial")
    assert usage_line(made, partial, 0.0, 1.0, KEY).verified is None
    assert usage_line(untold, facts(predicted_tokens=predicted), 0.0, 1.0, KEY).verified is None


@given(st.integers(0, 999), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_tiers_add_up_to_what_was_reported_and_the_farthest_is_missed_first(
    cached: int, device: int, host: int, store: int
) -> None:
    known = facts(predicted_tokens=device + host + store, host_tokens=host, store_tokens=store)
    line = usage_line(record(usage=Usage(1000, 1, cached)), known, 0.0, 1.0, KEY)
    parts = line.device_tokens, line.host_tokens, line.store_tokens
    assert None not in parts
    assert sum(part or 0 for part in parts) == cached
    assert parts[1:] <= (host, store)
    if (parts[2] or 0) > 0:
        assert parts[1] == host
    if cached >= device + host + store:
        assert parts[1:] == (host, store)
    assert line.computed_tokens == 1000 - cached


def test_the_usage_line_equals_the_charge() -> None:
    line = usage_line(record(charged_tokens=123), facts(), 0.0, 1.0, KEY)
    assert line.computed_tokens == 123


def test_the_hash_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(2):
        write(UsageLog(settings(path)), record())
    first, second = written(path)
    assert first["hash_ids"] == second["hash_ids"]
    assert (tmp_path / "a.jsonl.key").stat().st_mode & 0o777 == 0o600
    elsewhere = tmp_path / "b.jsonl"
    write(UsageLog(settings(elsewhere)), record())
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


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.observe.usage.QUEUE_LEN_MAX", 2)
    log = UsageLog(settings(tmp_path / "a.jsonl"))
    for _ in range(5):
        log.add(record(), 11.0)
    assert (log.stats.dropped["queue_full"], log.stats.queued) == (3, 2)
    log.start()
    log.close()
    assert len(written(tmp_path / "a.jsonl")) == log.stats.written == 2
    assert log.stats.queued == 0


def test_the_tokens_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.observe.usage.QUEUE_TOKENS_MAX", 1000)
    log = UsageLog(settings(tmp_path / "a.jsonl"))
    for _ in range(2):
        log.add(record(facts(600)), 11.0)
    assert log.stats.dropped["queue_full"] == 1
    log.start()
    log.close()
    log.add(record(facts(600)), 11.0)
    assert log.stats.dropped["queue_full"] == 1, "what was written makes room"


def test_text_chosen_by_clients_counts_in_the_queues_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.observe.usage.QUEUE_TOKENS_MAX", 1000)
    log = UsageLog(settings(tmp_path / "a.jsonl"))
    log.add(record(facts(1, extras=PromptExtras(cache_salt="s" * 2000))), 11.0)
    assert log.stats.dropped["queue_full"] == 1


def test_the_files_are_for_their_owners_eyes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = UsageLog(settings(path, file_bytes_max=2000))
    write(log, *(record() for _ in range(20)))
    assert log.stats.rotations
    for file in (path, Path(f"{path}.1"), Path(f"{path}.key")):
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("files_max", [1, 2, 4])
def test_files_are_rotated_by_size_and_count(tmp_path: Path, files_max: int) -> None:
    path, bytes_max = tmp_path / "a.jsonl", 2000
    log = UsageLog(settings(path, file_bytes_max=bytes_max, files_max=files_max))
    write(log, *map(numbered, range(60)))
    files = rotated_files(path)
    assert [file.name.removeprefix("a.jsonl") for file in files] == [
        *(f".{number}" for number in range(files_max - 1, 0, -1)),
        "",
    ]
    assert all(file.stat().st_size <= bytes_max for file in files)
    kept = numbers(*files)
    assert kept == list(range(60 - len(kept), 60)), "the latest lines, in order"
    assert log.stats.written == 60
    assert log.stats.files_removed == log.stats.rotations - (files_max - 1) > 0


def test_a_line_longer_than_a_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = UsageLog(settings(path, file_bytes_max=10))
    write(log, numbered(1), numbered(2))
    assert numbers(*rotated_files(path)) == [1, 2]


def test_half_a_line_left_by_a_crash_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"generated_tokens": 1}\n{"gener')
    write(UsageLog(settings(path)), numbered(2))
    assert numbers(path) == [1, 2]


def test_a_disk_that_refuses_keeps_the_lines_until_it_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.observe.usage.QUEUE_LEN_MAX", 3)
    path = tmp_path / "gone" / "a.jsonl"
    log = UsageLog(settings(path))
    log.start()
    try:
        log.add(numbered(1), 11.0)
        wait_until(lambda: log.stats.write_failures, "the disk refused")
        for number in range(2, 6):
            log.add(numbered(number), 11.0)
        wait_until(lambda: log.stats.write_failures > 1, "the disk refused again")
        lost = log.stats.dropped["not_writable"]
        assert (lost, log.stats.dropped["queue_full"]) == (2, 0)
        path.parent.mkdir()
        wait_until(lambda: log.stats.written == 3, "written later")
    finally:
        log.close()
    assert numbers(path) == [1, 2, 3]


def test_lines_that_were_never_written_are_counted_at_the_end(tmp_path: Path) -> None:
    log = UsageLog(settings(tmp_path / "gone" / "a.jsonl"))
    write(log, record(), record())
    assert (log.stats.dropped["not_writable"], log.stats.written) == (2, 0)


@pytest.mark.skipif(not _FULL.exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_counted_and_fails_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to(_FULL)
    log = UsageLog(settings(path))
    write(log, record())
    assert (log.stats.dropped["not_writable"], log.stats.written) == (1, 0)
    assert log.stats.write_failures > 0


def test_lines_are_synced_within_their_interval_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        fsync(file)
        synced.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr("kvatlas.router.observe.usage.FSYNC_INTERVAL_S", 1e-9)
    often = UsageLog(settings(path))
    often.start()
    often.add(record(), 11.0)
    wait_until(lambda: synced, "synced while running")
    often.close()
    assert synced == [path.stat().st_size], "once: nothing was written since"
    monkeypatch.setattr("kvatlas.router.observe.usage.FSYNC_INTERVAL_S", 1e6)
    seldom = UsageLog(settings(path))
    write(seldom, record(), record())
    assert synced[-1] == path.stat().st_size


def test_lines_are_written_without_waiting_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = UsageLog(settings(path))
    log.start()
    try:
        log.add(record(), 11.0)
        wait_until(lambda: log.stats.written, "written")
        assert len(written(path)) == 1
    finally:
        log.close()


def test_a_request_is_recorded_once_and_its_prompt_is_not_kept(tmp_path: Path) -> None:
    clock = count(10)
    tracker = RequestTracker(lambda: float(next(clock)))
    log = UsageLog(settings(tmp_path / "a.jsonl"))
    tracker.on_end = log.add
    made = tracker.begin("POST", "/v1/chat/completions")
    made.placement_facts = facts
    tracker.end(made)
    assert made.placement_facts() is None
    log.start()
    log.close()
    (line,) = written(tmp_path / "a.jsonl")
    assert (line["hashed_tokens"], line["duration_s"]) == (700, 1.0)


def test_a_long_queue_is_written_in_bounded_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.observe.usage._BATCH_BYTES", 2000)
    sizes: list[int] = []
    write = UsageLog._write_batch

    def watched(log: UsageLog) -> None:
        sizes.append(sum(map(len, log._batch)))
        write(log)

    monkeypatch.setattr(UsageLog, "_write_batch", watched)
    log = UsageLog(UsageSettings(path=str(tmp_path / "usage.jsonl")))
    for number in range(50):
        log.add(record(request_id=f"r{number}"), 11.0)
    log.start()
    log.close()
    lines = written(tmp_path / "usage.jsonl")
    assert len(lines) == 50
    longest = max(map(len, (tmp_path / "usage.jsonl").read_bytes().splitlines())) + 1
    assert max(sizes) < 2000 + longest
