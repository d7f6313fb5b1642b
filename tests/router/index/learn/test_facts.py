"""Facts that no event carries: from which source each is taken, and how receipts change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.fleet.statement import EngineStatement, metrics_statement
from kvatlas.router.index.learn.facts import DropReceipts, Fact, SetupEvidence
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_file import read_trace, trace_facts
from kvatlas.router.tools.trace_verification import RECORDED, ProbePrompt, apply_line, learn_trace
from tests.support.event_writer import Prompt, Writer, batch, tokens
from tests.support.paths import ROOT

TRACES = ROOT / "tests" / "data" / "traces"
PROMPT = tokens(97)
UNCONFIGURED = ModelFacts()
DRAFTS = metrics_statement({"block_size": "16"}, drafts=True)
PLAIN = metrics_statement({"block_size": "16"}, drafts=False)


def writer(group: int, kind: str, size: int = 16, **more: Any) -> Writer:
    return Writer(HashScheme(hash_block_size=16), group=group, kind=kind, size=size, **more)


FULL = writer(0, "full_attention")
STATES = writer(1, "mamba")


def informed(*statements: EngineStatement | None, **hints: Any) -> SetupEvidence:
    return SetupEvidence(statements=tuple(s for s in statements if s is not None), **hints)


def info(method: str = "", **more: Any) -> EngineStatement:
    return EngineStatement(source="server_info", drafts=bool(method), method=method, **more)


def fleet_with(evidence: SetupEvidence, *writers: Writer, facts: ModelFacts = UNCONFIGURED) -> FleetResidency:
    fleet = FleetResidency(facts)
    fleet.engine("a").learn_setup(evidence)
    fleet.apply("a", batch(*(one.stored(PROMPT[:96]) for one in writers)))
    return fleet


def fact(fleet: FleetResidency, name: str) -> Fact | None:
    return next((f for f in fleet.engine("a").found_facts if f.name == name), None)


def hit(fleet: FleetResidency, length: int = 97) -> int:
    return fleet.predict(Prompt(PROMPT[:length]), ["a"])["a"].hit_tokens


@pytest.mark.parametrize(
    ("evidence", "one_kind", "two_kinds", "source", "certainty"),
    [
        (informed(), (), (), "none", "assumed"),
        (informed(PLAIN), (), (), "metrics", "certain"),
        (informed(DRAFTS), "all", "all", "metrics", "assumed"),
        (informed(DRAFTS, drafter="mtp"), "all", (0,), "config.json", "likely"),
        (informed(DRAFTS, drafter="eagle"), "all", "all", "config.json", "likely"),
        (informed(PLAIN, drafter="mtp"), (), (), "metrics", "certain"),
        (informed(info("eagle3"), DRAFTS), "all", "all", "server_info", "certain"),
        (informed(info("ngram"), DRAFTS, drafter="mtp"), (), (), "server_info", "certain"),
        (informed(info("eagle", keeps_last_block=True), DRAFTS), (), (), "server_info", "certain"),
        (informed(info(), PLAIN), (), (), "server_info", "certain"),
    ],
)
def test_which_look_ups_drop_a_block(
    evidence: SetupEvidence, one_kind: object, two_kinds: object, source: str, certainty: str
) -> None:
    single = fleet_with(evidence, FULL)
    assert fact(single, "eagle_groups") == Fact("eagle_groups", one_kind, source, certainty)  # type: ignore[arg-type]
    assert hit(single) == (80 if one_kind else 96)
    several = fleet_with(evidence, STATES, FULL)
    found = fact(several, "eagle_groups")
    assert found is not None
    assert found.value == two_kinds


def test_the_group_of_the_last_layer_is_only_likely() -> None:
    fleet = fleet_with(informed(info("mtp")), STATES, FULL)
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", (0,), "server_info", "likely")


def test_configured_facts_precede_all_evidence() -> None:
    fleet = fleet_with(informed(info("eagle3")), FULL, facts=ModelFacts(eagle_groups=()))
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", (), "configuration", "certain")
    for _ in range(50):
        fleet.engine("a").learn_receipt(96, 80, 97)
    assert hit(fleet) == 96


def test_configured_facts_are_shown_with_their_source() -> None:
    facts = ModelFacts(attention_chunk_size=128, windows={1: 64})
    found = fleet_with(informed(from_file=frozenset({"windows"})), FULL, facts=facts)
    assert fact(found, "attention_chunk_size") == Fact(
        "attention_chunk_size", 128, "configuration", "certain"
    )
    assert fact(found, "windows") == Fact("windows", {1: 64}, "config.json", "likely")
    assert fact(found, "kinds") is None


def test_evidence_that_comes_later_costs_no_block() -> None:
    fleet = fleet_with(informed(), FULL)
    assert hit(fleet) == 96
    fleet.engine("a").learn_setup(informed(info("eagle3")))
    assert hit(fleet) == 80
    fleet.forget("a")  # a restart: it is expected to be as before
    fleet.apply("a", batch(FULL.stored(PROMPT[:96])))
    assert hit(fleet) == 80
    fleet.stage("a", batch(FULL.stored(PROMPT[:96])))
    fleet.adopt("a")
    assert hit(fleet) == 80


def test_hashes_that_look_ahead_end_the_question() -> None:
    ahead = Writer(HashScheme(hash_block_size=16, lookahead=1), group=0, kind="full_attention", size=16)
    fleet = fleet_with(informed(info("eagle3")), ahead)
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", (), "events", "certain")


def test_receipts_find_and_revoke() -> None:
    fleet = fleet_with(informed(), FULL)
    engine = fleet.engine("a")
    for _ in range(3):
        engine.learn_receipt(96, 80, 97)
    assert hit(fleet) == 96
    engine.learn_receipt(64, 48, 97)
    assert hit(fleet) == 80
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", "all", "receipts", "likely")
    for _ in range(8):
        engine.learn_receipt(80, 80, 97)
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", "all", "receipts", "confirmed")
    for _ in range(64):
        engine.learn_receipt(80, 96, 97)
    assert hit(fleet) == 96
    for _ in range(64):
        engine.learn_receipt(96, 80, 97)
    found = fact(fleet, "eagle_groups")
    assert found is not None
    assert found.certainty == "disputed"
    for _ in range(200):
        engine.learn_receipt(80, 96, 97)
    assert hit(fleet) == 80


def test_receipts_revoke_what_was_only_assumed() -> None:
    """Drafts without KV of their own (n-gram): the metrics do not say."""
    fleet = fleet_with(informed(DRAFTS), FULL)
    assert hit(fleet) == 80
    for _ in range(4):
        fleet.engine("a").learn_receipt(80, 96, 97)
    assert hit(fleet) == 96
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", (), "receipts", "likely")
    fleet.engine("a").learn_setup(informed(info("eagle3")))  # a new process says what it is
    assert hit(fleet) == 80


@given(st.lists(st.sampled_from([0, 16, 16, 32, -16]), min_size=30, max_size=100))
def test_evictions_alone_are_no_evidence(errors: list[int]) -> None:
    """Where a third of the hits are exact, one kind of groups cannot be dropping a block each time."""
    receipts = DropReceipts()
    for index, error in enumerate(errors):
        assert receipts.add(0 if index % 3 == 0 else error, {16}, single=True) == 0


@given(st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 16, -16, 5]), max_size=200))
def test_exact_predictions_count_alike_while_others_are_judged_or_not(errors: list[int]) -> None:
    short, whole = DropReceipts(), DropReceipts()
    for error in errors:
        change = whole.add(error, {16}, single=True)
        if short.agree and not error:
            short.add_exact()
            assert not change
        else:
            assert short.add(error, {16}, single=True) == change
        assert short.agree == whole.agree


def test_other_evidence_ends_the_agreement_of_predictions() -> None:
    receipts = DropReceipts()
    for _ in range(50):
        receipts.add(0, {16}, single=True)
    assert receipts.agree
    receipts.restart()
    assert not receipts.agree


def test_hits_of_nothing_say_nothing() -> None:
    fleet = fleet_with(informed(DRAFTS), FULL)
    for _ in range(50):
        fleet.engine("a").learn_receipt(0, 0, 97)
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", "all", "metrics", "assumed")


def test_a_stated_block_size_is_known_from_the_first_short_prompt() -> None:
    """Without it a lone block of one hash block is taken for a whole one."""
    long = metrics_statement(
        {"effective_attention_block_size": "64", "mamba_cache_mode": "align"}, drafts=False
    )
    fleet = FleetResidency(ModelFacts())
    fleet.engine("a").learn_setup(informed(long))
    parts = writer(0, "full_attention"), writer(1, "mamba")
    fleet.apply("a", batch(parts[0].stored(PROMPT, start=0, stop=1)))
    alone = fleet.engine("a").layout
    assert alone is not None
    assert (alone.groups[0].block_size, alone.hash_block_size) == (64, 16)
    fleet.apply("a", batch(parts[1].stored(PROMPT, start=0, stop=1)))
    layout = fleet.engine("a").layout
    assert layout is not None
    assert [group.block_size for group in layout.groups] == [64, 16]
    assert layout.hash_block_size == 16
    assert fact(fleet, "attention_block_size") == Fact("attention_block_size", 64, "metrics", "certain")
    assert fact(fleet, "mamba_cache_mode") == Fact("mamba_cache_mode", "align", "metrics", "certain")


def inside(labels: dict[str, str], more: EngineStatement) -> FleetResidency:
    """Blocks of 32 and states of 16, as with decode context parallelism of 2: the last state is at 80."""
    stated = informed(more, metrics_statement({"mamba_cache_mode": "align", **labels}, drafts=False))
    full = writer(0, "full_attention", 32)
    fleet = FleetResidency(UNCONFIGURED)
    fleet.engine("a").learn_setup(stated)
    events = [full.stored(PROMPT[:64]), STATES.stored(PROMPT[:80], keep=(3, 4))]
    part = writer(0, "full_attention").stored(PROMPT[:80], start=4)
    fleet.apply("a", batch(events[0], part, events[1]))
    return fleet


@pytest.mark.parametrize(
    ("labels", "ranks", "expected"),
    [
        ({}, None, None),
        ({"effective_attention_block_size": "32"}, None, None),
        ({"effective_attention_block_size": "32", "mamba_block_size": "16"}, None, ("metrics", "likely")),
        ({}, 2, ("server_info", "certain")),
    ],
)
def test_decode_context_parallelism_is_known_from_the_engine_itself(
    labels: dict[str, str], ranks: int | None, expected: tuple[Any, Any] | None
) -> None:
    """With EAGLE in every group no event proves it, so that hits inside a block would stay unknown."""
    fleet = inside(labels, info("eagle3", decode_ranks=ranks))
    known = None if expected is None else Fact("decode_ranks", 2, *expected)
    assert fact(fleet, "decode_ranks") == known
    layout = fleet.engine("a").layout
    assert layout is not None
    assert layout.alignment == (16 if expected else 32)
    assert hit(fleet) == (64 if expected else 0)
    found = fact(fleet, "alignment")
    assert (found and found.certainty) == (expected[1] if expected else "likely")


def test_a_stated_mamba_block_is_known_from_the_first_short_prompt() -> None:
    fleet = FleetResidency(UNCONFIGURED)
    labels = {"mamba_cache_mode": "align", "mamba_block_size": "64"}
    fleet.engine("a").learn_setup(informed(metrics_statement(labels, drafts=False)))
    fleet.apply("a", batch(writer(1, "mamba").stored(PROMPT[:32], keep=(1,)), FULL.stored(PROMPT[:32])))
    layout = fleet.engine("a").layout
    assert layout is not None
    assert [group.block_size for group in layout.groups] == [16, 64]
    assert layout.hash_block_size == layout.alignment == 16
    assert fact(fleet, "mamba_block_size") == Fact("mamba_block_size", 64, "metrics", "certain")


@pytest.mark.parametrize(
    ("configured", "label", "value", "source"),
    [
        (None, None, 0, "none"),
        (None, "0", 0, "metrics"),
        (None, "128", 128, "metrics"),
        (None, "None", "dense", "metrics"),
        (None, "-3", 0, "none"),
        (64, "128", 64, "configuration"),
        ("dense", "0", "dense", "configuration"),
    ],
)
def test_the_retention_interval_is_the_engines_own(
    configured: Any, label: str | None, value: object, source: Any
) -> None:
    labels = {"block_size": "16"} | ({} if label is None else {"prefix_cache_retention_interval": label})
    stated = informed(metrics_statement(labels, drafts=False))
    windows = writer(1, "sliding_window", window=64)
    facts = ModelFacts(retention_interval=configured)
    fleet = fleet_with(stated, FULL, windows, facts=facts)
    certainty: Any = "assumed" if source == "none" else "certain"
    assert fact(fleet, "retention_interval") == Fact("retention_interval", value, source, certainty)
    assert fleet.engine("a").facts.retention_interval == value
    assert fact(fleet_with(stated, FULL, facts=facts), "retention_interval") is None


def test_windows_that_are_published_are_not_replayed() -> None:
    stated = informed(EngineStatement(source="metrics", bounded_replay=True), replay_tokens=64)
    fleet = fleet_with(stated, FULL)
    assert fact(fleet, "replay_tokens") == Fact("replay_tokens", 64, "config.json", "likely")
    assert [hit(fleet, length) for length in (65, 97)] == [0, 96]
    fleet.apply("a", batch(writer(1, "sliding_window", window=64).stored(PROMPT[:96])))
    assert fact(fleet, "replay_tokens") is None
    assert hit(fleet, 65) == 64
    off = informed(EngineStatement(source="metrics", bounded_replay=False), replay_tokens=64)
    assert fact(fleet_with(off, FULL), "replay_tokens") is None


def replayed(path: Path, evidence: SetupEvidence, *, receipts: bool) -> list[int]:
    """The error of each probe of a recording, none of its groups being marked by a setting."""
    fleet = FleetResidency(replace(trace_facts(path), eagle_groups=None))
    fleet.engine(RECORDED).learn_setup(evidence)
    learn_trace(fleet, path)
    errors = []
    for number, line in read_trace(path):
        if line.events is not None:
            apply_line(fleet, path, number, line)
        elif line.probe is not None and line.hit_tokens is not None:
            found = fleet.predict(ProbePrompt.from_probe(line.probe), [RECORDED])[RECORDED].hit_tokens
            errors.append(found - line.hit_tokens)
            if receipts:
                fleet.engine(RECORDED).learn_receipt(found, line.hit_tokens, len(line.probe.token_ids))
    return errors


RECORDED_MTP = [
    f"{name}.jsonl.gz"
    for name in ("eagle_full.1", "eagle_hybrid.1", "eagle_mamba_fine.41", "eagle_one_visible.51")
]


@pytest.mark.parametrize("name", RECORDED_MTP)
def test_recorded_drafters_need_no_setting(name: str) -> None:
    """The engine says that it drafts, ``config.json`` how: every probe of vLLM's scheduler is exact."""
    assert not any(replayed(TRACES / name, informed(DRAFTS, drafter="mtp"), receipts=True))
    assert any(replayed(TRACES / name, informed(), receipts=False))


@pytest.mark.parametrize("name", RECORDED_MTP)
def test_recorded_drafters_are_found_by_receipts_alone(name: str) -> None:
    errors = replayed(TRACES / name, informed(), receipts=True)
    assert sum(error != 0 for error in errors) <= 5
    assert not any(errors[-len(errors) // 3 :])


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_receipts_of_other_recordings_find_no_drafter(path: Path) -> None:
    if not path.name.startswith("eagle"):
        assert not any(replayed(path, informed(), receipts=True))


def test_parts_of_stated_blocks_show_the_hash_block() -> None:
    """Also where the hashes cannot be computed (a random seed)."""
    stated = metrics_statement({"effective_attention_block_size": "64"}, drafts=False)
    fleet = FleetResidency(UNCONFIGURED)
    fleet.engine("a").learn_setup(informed(stated))
    strange = Writer(HashScheme(seed="drawn at random"), kind="full_attention")
    fleet.apply("a", batch(*(strange.stored(tokens(16, seed=number)) for number in range(20))))
    layout = fleet.engine("a").layout
    assert layout is not None
    assert (layout.groups[0].block_size, layout.hash_block_size) == (64, 16)


ALIGN_STATED = metrics_statement({"mamba_cache_mode": "align"}, drafts=False)


@pytest.mark.parametrize(
    ("evidence", "facts", "alignment", "source", "certainty"),
    [
        (informed(), UNCONFIGURED, 32, "events", "likely"),
        (informed(ALIGN_STATED), UNCONFIGURED, 16, "metrics", "certain"),
        (informed(), ModelFacts(mamba_cache_mode="align"), 16, "configuration", "certain"),
        (informed(), ModelFacts(mamba_cache_mode="all"), 32, "events", "certain"),
        (informed(), ModelFacts(mamba_cache_mode="align", partial_hash_hits=False), 32, "configuration",
         "certain"),
    ],
)  # fmt: skip
def test_where_hits_end_is_a_fact_with_its_source(
    evidence: SetupEvidence, facts: ModelFacts, alignment: int, source: str, certainty: str
) -> None:
    fleet = fleet_with(evidence, writer(0, "full_attention"), writer(1, "mamba", 32), facts=facts)
    assert fact(fleet, "hash_block_size") == Fact("hash_block_size", 16, "events", "certain")
    assert fact(fleet, "alignment") == Fact("alignment", alignment, source, certainty)  # type: ignore[arg-type]


def test_hits_inside_a_block_are_shown_as_proven_by_events() -> None:
    fleet = FleetResidency(ModelFacts(mamba_cache_mode="align"))
    wide = writer(0, "full_attention", 32)
    fleet.apply("a", batch(wide.stored(PROMPT[:96]), STATES.stored(PROMPT[:96], keep=[5])))
    assert fact(fleet, "alignment") == Fact("alignment", 32, "events", "likely")
    fleet.apply("a", batch(STATES.stored(tokens(48, seed=1), keep=[2])))
    assert fact(fleet, "alignment") == Fact("alignment", 16, "events", "certain")


def test_the_block_of_an_assumed_scheme_is_assumed() -> None:
    strange = Writer(HashScheme(seed="drawn at random"), group=0, kind="chunked_local_attention")
    fleet = FleetResidency(ModelFacts(attention_chunk_size=64))
    fleet.apply("a", batch(strange.stored(PROMPT[:32], start=1)))
    assert fact(fleet, "hash_block_size") == Fact("hash_block_size", 16, "none", "assumed")


def test_hits_of_prompts_that_end_with_a_block_reveal_groups_without_events() -> None:
    """A ring numbered behind the only other group: vLLM then looks up the block that EAGLE drops behind the
    last token but one (``get_kv_cache_coordinator``)."""
    fleet = fleet_with(informed(info("eagle3")), FULL)
    assert hit(fleet, 96) == 64
    for _ in range(3):
        fleet.engine("a").learn_receipt(64, 80, 96)
    assert fact(fleet, "hidden_groups") is None
    fleet.engine("a").learn_receipt(64, 80, 96)
    assert fact(fleet, "hidden_groups") == Fact("hidden_groups", True, "receipts", "likely")
    assert (hit(fleet, 96), hit(fleet, 97)) == (80, 80)
    fleet.engine("a").learn_receipt(80, 64, 96)
    assert fact(fleet, "hidden_groups") is None
    assert hit(fleet, 96) == 64


def test_hits_of_prompts_that_end_with_a_block_reveal_nothing_while_it_is_unknown_what_is_dropped() -> None:
    fleet = fleet_with(informed(DRAFTS), FULL)
    for _ in range(3):
        fleet.engine("a").learn_receipt(64, 80, 96)
    assert hit(fleet, 96) == 64
    fleet.engine("a").learn_receipt(64, 80, 96)
    assert fact(fleet, "hidden_groups") is None
    assert fact(fleet, "eagle_groups") == Fact("eagle_groups", (), "receipts", "likely")


def test_a_gap_in_the_numbers_is_shown_as_groups_without_events() -> None:
    fleet = fleet_with(informed(), writer(1, "full_attention"))
    assert fact(fleet, "hidden_groups") == Fact("hidden_groups", True, "events", "certain")
