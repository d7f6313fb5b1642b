"""``kvatlas explain``: the engine's own truth at every seq, and for each block the right reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from publisher.block_hash import NO_EXTRAS, HashScheme
from publisher.events import SpecClass
from router.index.hit_rules import order_matters
from router.index.learn.layout import CacheLayout
from router.tools.capture import TRACE_SOURCE, CaptureLine, encode_lines, read_capture, redact
from router.tools.explain import ExplainOptions, run_explain
from router.tools.explain_state import EngineExplanation, explain_engine, needs
from router.tools.replay import facts_of
from router.tools.replay_player import Player, up_to
from router.tools.trace_verification import ProbePrompt, read_trace
from tests.router.index.rules.layouts import evaluate_one, models, residencies
from tests.support.captures import (
    BLOCK,
    CAPTURES,
    CLEARED,
    ENGINE,
    hashes,
    removed,
    stored,
    tokens,
    truth,
    write,
)
from tests.support.examples import examples, some
from tests.support.paths import TRACES
from tests.vllm.make_captures import RESET_AFTER

PROMPT = tokens(8 * BLOCK)
BOTH = [stored(PROMPT), stored(PROMPT, group=1)]


def at(path: Path, seq: int | None) -> Player:
    player = Player(facts_of([path]))
    player.learn(read_capture([path]))
    player.play_all(up_to(read_capture([path]), seq))
    return player


def one(path: Path, token_ids: list[int], seq: int | None = None) -> EngineExplanation:
    player = at(path, seq)
    return explain_engine(player, player.runs[0].source, ProbePrompt(token_ids, NO_EXTRAS))


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_hits_are_what_the_engine_reported_at_every_seq(path: Path) -> None:
    """All but the first after the cache reset: engines publish the reset with that prompt's own blocks."""
    asked = [
        entry
        for number, entry in enumerate(truth(path))
        if entry["after_seq"] is not None and number != RESET_AFTER
    ]
    assert len(asked) > 30
    assert sum(entry["cached_tokens"] > 0 for entry in asked) > 5
    for entry in asked:
        found = one(path, entry["token_ids"], entry["after_seq"])
        assert found.hit_tokens == entry["cached_tokens"]
        assert (found.ended_by is None) == found.whole_prompt


@pytest.mark.parametrize("path", some(TRACES, 4), ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_hit_lacks_no_block_and_a_longer_one_does(path: Path) -> None:
    """The hit rules read backwards agree with the serving code on every recorded layout."""
    player = Player(facts_of([path]))
    frames = {frame.line: frame for frame in read_capture([path])}
    for number, line in read_trace(path):  # prompts too may show how the engine hashes
        if number in frames:
            player.play(frames[number])
        elif line.probe is not None and player.runs:
            prompt = ProbePrompt(line.probe.token_ids, line.probe.extras())
            player.fleet.predict(prompt, [TRACE_SOURCE])
        if player.runs:
            player.fleet.engine(TRACE_SOURCE).finish_detection()
    player.learn(())
    checked = 0
    for number, line in read_trace(path):
        if number in frames:
            player.play(frames[number])
        layout = player.fleet.engine(TRACE_SOURCE).layout if player.runs else None
        if line.probe is None or layout is None or order_matters(layout):
            continue
        prompt = ProbePrompt(line.probe.token_ids, line.probe.extras())
        found = explain_engine(player, TRACE_SOURCE, prompt)
        assert found.hit_tokens == line.hit_tokens
        checked += 1
        if found.next_boundary is not None:
            assert found.next_boundary.missing_blocks > 0
            assert found.ended_by is not None
        if found.shared_prefix_boundary is not None:
            labels = [c.label for c in layout.classes if c.family == "full"]
            assert not set(labels) & set(found.shared_prefix_boundary.by_class)
    assert checked or "eagle" in path.name


def test_never_stored(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT[: 3 * BLOCK])])])
    found = one(path, PROMPT)
    assert found.hit_tokens == 3 * BLOCK
    assert found.ended_by is not None
    assert (found.ended_by.why, found.ended_by.block, found.ended_by.seq) == ("never stored", 3, None)
    assert found.ended_by.tokens == (3 * BLOCK, 4 * BLOCK)
    assert found.ended_by.hash == f"{hashes(PROMPT)[3]:016x}"


def test_masked(tmp_path: Path) -> None:
    """The window's blocks in the middle were computed and not kept: covered by an event, not listed."""
    window = stored(PROMPT, group=1, blocks=[6, 7])
    path = write(tmp_path / "c.jsonl", [(0, BOTH), (1, [CLEARED]), (2, [stored(PROMPT), window])])
    other = PROMPT[: 5 * BLOCK] + tokens(BLOCK * 2, seed=5)
    found = one(path, other)
    assert found.hit_tokens == 0
    assert found.shared_prefix_tokens == 5 * BLOCK
    assert found.shared_prefix_boundary is not None
    assert found.shared_prefix_boundary.first == found.ended_by
    assert found.ended_by is not None
    assert (found.ended_by.group, found.ended_by.block) == (1, 3)
    assert (found.ended_by.why, found.ended_by.seq) == ("cleared", 1)
    fresh = write(tmp_path / "d.jsonl", [(0, [stored(PROMPT), window])])
    found = one(fresh, other)
    assert found.ended_by is not None
    assert (found.ended_by.why, found.ended_by.seq, found.ended_by.event) == ("masked", 0, 1)


def test_evicted_says_when_and_time_travel_goes_before_it(tmp_path: Path) -> None:
    batches: list[Any] = [(0, [stored(PROMPT)]), (1, [removed(PROMPT, 7), removed(PROMPT, 4)])]
    path = write(tmp_path / "c.jsonl", batches)
    found = one(path, [*PROMPT, 1])
    assert found.hit_tokens == 4 * BLOCK
    assert found.ended_by is not None
    assert found.ended_by.why == "evicted"
    assert (found.ended_by.seq, found.ended_by.event, found.ended_by.stored_seq) == (1, 1, 0)
    before = one(path, [*PROMPT, 1], 0)
    assert (before.hit_tokens, before.whole_prompt, before.ended_by) == (8 * BLOCK, True, None)


def test_cleared_and_restarted(tmp_path: Path) -> None:
    cleared = one(write(tmp_path / "c.jsonl", [(0, [stored(PROMPT)]), (1, [CLEARED])]), PROMPT)
    assert cleared.ended_by is not None
    assert (cleared.ended_by.why, cleared.ended_by.seq, cleared.ended_by.stored_seq) == ("cleared", 1, 0)
    other = stored(tokens(2 * BLOCK, seed=9))
    restarted = one(write(tmp_path / "d.jsonl", [(0, [stored(PROMPT)]), (1, []), (0, [other])]), PROMPT)
    assert restarted.ended_by is not None
    assert (restarted.ended_by.why, restarted.ended_by.seq) == ("restarted", 0)


def test_what_the_capture_does_not_hold_is_said(tmp_path: Path) -> None:
    found = one(write(tmp_path / "c.jsonl", [(5, [stored(PROMPT)]), (9, [removed(PROMPT, 1)])]), PROMPT)
    assert found.history == "the capture begins at seq 5, 3 batches are missing in 1 gaps"


def run(options: ExplainOptions, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = run_explain(options, as_json=True)
    return status, json.loads(capsys.readouterr().out)


def test_the_choice_is_the_engine_that_holds_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT[: 3 * BLOCK])])], source="http://a:1")
    write(path, [(0, [stored(PROMPT)])], source="http://b:1")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": PROMPT}))
    status, said = run(ExplainOptions(body, (path,)), capsys)
    assert (status, said["choice"]["engine"], said["choice"]["hit_tokens"]) == (0, "http://b:1", 7 * BLOCK)
    assert [engine["hit_tokens"] for engine in said["engines"]] == [3 * BLOCK, 7 * BLOCK]


@pytest.mark.long
def test_a_redacted_capture_needs_the_scheme_and_is_exact_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = CAPTURES[0]
    path = tmp_path / "redacted.jsonl"
    with path.open("wb") as file:
        for frame in read_capture([source]):
            payload = redact(frame.payload)
            assert payload is not None
            file.write(
                encode_lines([CaptureLine(frame.source, frame.recv_ts, frame.topic, frame.seq, payload)])
            )
    entry = max(truth(source), key=lambda e: e["cached_tokens"])
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"token_ids": entry["token_ids"]}))
    status, said = run(ExplainOptions(body, (path,), at=entry["after_seq"]), capsys)
    assert status == 1
    assert "--hash-scheme" in said["engines"][0]["why_unknown"]
    options = ExplainOptions(body, (path,), at=entry["after_seq"], hash_scheme="sha256,size=16")
    status, said = run(options, capsys)
    assert (status, said["engines"][0]["hit_tokens"]) == (0, entry["cached_tokens"])


def test_a_wrong_scheme_finds_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT)])])
    scheme = HashScheme(seed="other", hash_block_size=BLOCK)
    found = explain_engine(at(path, None), ENGINE, ProbePrompt(PROMPT, NO_EXTRAS), scheme)
    assert found.hit_tokens == 0


cases = st.tuples(models(), st.integers(1, 420)).flatmap(
    lambda case: st.tuples(st.just(case[0]), st.just(case[1]), residencies(*case))
)


@settings(max_examples=examples(150), deadline=None)
@given(cases)
def test_a_class_alone_reaches_as_far_as_its_needs_are_met(
    case: tuple[CacheLayout, int, dict[int, set[int]]],
) -> None:
    layout, num_tokens, units = case
    assume(not order_matters(layout))
    unit = layout.hash_block_size

    def met(spec_class: SpecClass, boundary: int) -> bool:
        return all(
            any(all(end // unit - 1 in units[group] for group in spec_class.group_idxs) for end in need.ends)
            for need in needs(layout, spec_class, boundary, num_tokens)
        )

    boundaries = range(layout.alignment, num_tokens, layout.alignment)
    by_class = evaluate_one(layout, num_tokens, units, detail=True).by_class
    for spec_class, reached in zip(layout.classes, by_class, strict=True):
        assert reached[0] == max((end for end in boundaries if met(spec_class, end)), default=0)
