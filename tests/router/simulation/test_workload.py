"""Workloads, read and generated: the format, arrivals, turns, hashes, and the same draw for a seed."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.requests import (
    Asked,
    Request,
    WorkloadError,
    _mix,
    block_hashes,
    continued,
    spread,
)
from kvatlas.router.simulation.traces import read
from kvatlas.router.simulation.workload import GENERATORS, agents, chat, documents, shared, tenants
from tests.router.simulation.support import line, write_lines


def asked(at_s: float, tokens: int, output: int, *ids: int, session: int | None = None) -> Asked:
    return Asked(at_s=at_s, input_tokens=tokens, output_tokens=output, ids=ids, session=session)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"input_length": 0}, "input_length = 0"),
        ({"input_length": "600"}, "input_length = '600'"),
        ({"input_length": True}, "input_length = True"),
        ({"output_length": -1}, "output_length = -1"),
        ({"output_length": 10**12}, "output_length = 1000000000000"),
        ({"output_length": None}, "output_length = None"),
        ({"timestamp": -1}, "timestamp = -1"),
        ({"timestamp": "now"}, "timestamp = 'now'"),
        ({"hash_ids": "12"}, "hash_ids: expected a list of whole numbers"),
        ({"hash_ids": [1, 2.5]}, "hash_ids: expected a list of whole numbers"),
        ({"hash_ids": [1]}, "hash_ids: 1 ids for input_length = 600; expected one per 512 tokens, so 2"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, bad: dict[str, Any], field: str) -> None:
    path = write_lines(tmp_path / "w.jsonl", line(), line(**bad))
    with pytest.raises(WorkloadError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: {field}")


@pytest.mark.parametrize(
    ("text", "said"), [("{", ":1: not JSON"), ("[1]", ":1: expected a JSON object"), ("", "no requests")]
)
def test_an_invalid_workload_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=said):
        read(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the file does not exist"):
        read(tmp_path / "nowhere.jsonl")
    whole = gzip.compress(json.dumps(line()).encode() * 50)
    for spoilt in (whole[:-20], whole[:20] + b"\xff\xff\xff" + whole[23:], b"plain text"):
        (tmp_path / "w.jsonl.gz").write_bytes(spoilt)
        with pytest.raises(WorkloadError):
            read(tmp_path / "w.jsonl.gz")


def test_requests_come_in_order_of_time_which_starts_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    lines = [line(timestamp=9000.5), line(timestamp=5000), line(timestamp=7000)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert [one.at_s for one in read(path)] == [0.0, 2.0, pytest.approx(4.0005)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(0, 5))
def test_ticks_are_spread_within_themselves_in_their_order(ticks: list[int], seed: int) -> None:
    coarse = [asked(3.0 * tick, 100, 1, index) for index, tick in enumerate(sorted(ticks))]
    fine = spread(coarse, seed=seed)
    times = [one.at_s for one in fine]
    assert times == sorted(times)
    assert [one.ids for one in fine] == [one.ids for one in coarse]
    for before, after in zip(coarse, fine, strict=True):
        assert before.at_s <= after.at_s <= before.at_s + 3.0
    assert times == [one.at_s for one in spread(coarse, seed=seed)]


@pytest.mark.parametrize("times", [(0.0, 0.5, 3.5), (100.0, 100.5)])
def test_times_that_are_fine_are_left_alone(times: tuple[float, ...]) -> None:
    fine = [asked(at_s, 100, 1, 1) for at_s in times]
    assert spread(fine) == fine


def test_ids_are_mixed_by_splitmix64() -> None:
    assert _mix(0) == 0xE220A8397B1DCDAF  # its first number from seed 0


def test_a_next_turn_says_what_was_generated() -> None:
    turns = continued([asked(0, 1000, 200, 1, 2), asked(9, 1300, 50, 1, 3, 4)])
    assert turns[0].ids == (1, 3, 4)[:3]
    assert turns[0].session == turns[1].session
    own = turns[1].ids
    assert own[:3] == (1, 3, 4)
    assert not set(own[3:]) & {1, 2, 3, 4}


def test_a_prompt_shorter_than_prompt_and_answer_does_not_go_on() -> None:
    turns = continued([asked(0, 1000, 500, 1, 2), asked(9, 1300, 50, 1, 3, 4)])
    assert turns[0].ids[:2] == (1, 2)
    assert turns[0].session != turns[1].session


def test_a_prompt_is_gone_on_from_once_and_the_longest_counts() -> None:
    first, longer, third, fourth = continued(
        [
            asked(0, 600, 10, 1, 9),
            asked(1, 1100, 10, 1, 2, 8),
            asked(2, 1600, 10, 1, 2, 3, 7),
            asked(3, 1700, 10, 1, 2, 5, 6),
        ]
    )
    assert longer.session == third.session == first.session, "1 -> 1 2 -> 1 2 3"
    assert fourth.session != third.session, "its longest prefix was gone on from already"


def test_known_sessions_do_not_go_on_from_each_other() -> None:
    turns = continued(
        [
            asked(0, 700, 10, 1, 2, session=5),
            asked(1, 800, 10, 1, 3, session=6),
            asked(2, 900, 10, 1, 4, session=5),
        ]
    )
    assert [turn.session for turn in turns] == [5, 6, 5]
    assert turns[0].ids == (1, 4), "the answer is what the session's next turn sends"
    assert turns[1].ids == (1, 3)


streams = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 512))


def stream(drawn: tuple[list[int], int]) -> Request:
    ids, tail = drawn
    return Request(at_s=0.0, input_tokens=512 * (len(ids) - 1) + tail, output_tokens=0, ids=tuple(ids))


@given(streams, streams, st.sampled_from([16, 64, 512, 1024]))
def test_hashes_are_equal_exactly_where_prefixes_are(one: Any, other: Any, block: int) -> None:
    left, right = stream(one), stream(other)
    hashes = [block_hashes(each, block) for each in (left, right)]
    assert len(hashes[0]) == left.num_tokens // block
    for index, (a, b) in enumerate(zip(*hashes, strict=False)):
        units = -(-(index + 1) * block // 512)
        assert (a == b) == (left.ids[:units] == right.ids[:units])
    assert len(set(hashes[0])) == len(hashes[0])


def test_blocks_that_units_cannot_tell_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 48 tokens do not fit"):
        block_hashes(stream(([1, 2], 512)), 48)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_draw_is_repeatable_and_well_formed(name: str) -> None:
    drawn = GENERATORS[name](300, 100.0, 7)
    assert drawn == GENERATORS[name](300, 100.0, 7)
    assert drawn != GENERATORS[name](300, 100.0, 8)
    assert len(drawn) == 300
    times = [one.at_s for one in drawn]
    assert times == sorted(times)
    assert times[0] >= 0
    for one in drawn:
        assert len(one.ids) == -(-one.input_tokens // one.unit_tokens)
        assert one.output_tokens >= 1


def test_chats_share_one_system_prompt_and_go_on() -> None:
    requests = continued(chat(500, 500.0, 1))
    assert len({one.ids[0] for one in requests}) == 1
    sessions = Counter(one.session for one in requests)
    assert max(sessions.values()) > 1
    seconds = Counter(one.ids[1] for one in requests if len(one.ids) > 1)
    assert len(seconds) > 0.5 * len(sessions), "beyond the system prompt every session has its own"


def test_tenants_share_long_prompts_and_some_come_more_often() -> None:
    drawn = tenants(2000, 600.0, 1)
    heads = Counter(one.ids[0] for one in drawn)
    assert 50 < len(heads) <= 150
    counts = [count for _, count in heads.most_common()]
    assert counts[0] > 5 * counts[len(counts) // 2]
    assert min(one.input_tokens for one in drawn) > 1500


def test_agents_fan_out_into_siblings_of_one_context() -> None:
    def siblings(drawn: list[tuple[float, tuple[int, ...]]]) -> int:
        """Requests within two seconds of another with the same context of whole units."""
        near = 0
        for (at_s, ids), (before_s, before) in zip(drawn[1:], drawn[:-1], strict=True):
            near += ids == before and at_s - before_s < 2.0
        return near

    def by_context(name: str) -> list[tuple[float, tuple[int, ...]]]:
        drawn = (agents if name == "agents" else tenants)(1500, 4000.0, 2)
        pairs = [
            (one.at_s, (one.session or 0, *one.ids[: one.input_tokens // UNIT_TOKENS - 1])) for one in drawn
        ]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))

    assert siblings(by_context("agents")) > 100
    assert siblings(by_context("tenants")) < 20


def test_documents_are_private_and_six_turns_long() -> None:
    requests = continued(documents(5000, 1000.0, 1))
    sessions = Counter(one.session for one in requests)
    assert (len(requests), len(sessions), set(sessions.values())) == (192 * 6, 192, {6})
    assert len({one.ids[0] for one in requests}) == 192
    assert statistics.fmean(one.input_tokens for one in requests) == 50_688
    assert sum(one.follows is not None for one in requests) == 192 * 5


def test_shared_prompts_come_in_bursts_and_their_questions_are_their_own() -> None:
    drawn = shared(4000, 1000.0, 1)
    heads = Counter(one.ids[:375] for one in drawn)
    assert len(heads) == 150
    assert len({one.ids[375] for one in drawn}) == len(drawn)
    assert {tail for one in drawn for tail in one.ids[375:]}.isdisjoint(one for head in heads for one in head)
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(drawn)]
    assert 1.7 < statistics.stdev(gaps) / statistics.fmean(gaps) < 2.3
    assert 950 < statistics.fmean(one.output_tokens for one in drawn) < 1050
