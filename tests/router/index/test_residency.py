"""From an engine's events to what it holds: order, copies, media, restarts, and input that makes no sense."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme, PromptExtras
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_tokens
from kvatlas.publisher.groups import Family
from kvatlas.publisher.snapshot import SnapshotLedger
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.index import engine as residency
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn import hash_scheme as detect
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.inflight import kept_prefixes, kept_rule
from tests.support.event_writer import FULL, WINDOW, Prompt, Writer, batch, removed, tokens
from tests.support.examples import examples

SCHEME = HashScheme()
MAMBA, CHUNKED = "mamba", "chunked_local_attention"
DENSE = Writer(SCHEME)
SPARSE = Writer(SCHEME, group=1, kind=WINDOW, window=64)
GPU = Plane("GPU", 0)


def fleet_of(**facts: Any) -> FleetResidency:
    return FleetResidency(ModelFacts(**facts))


def told(fleet: FleetResidency, *events: Event, engine_id: str = "a") -> FleetResidency:
    fleet.apply(engine_id, batch(*events))
    assert fleet.index.check_integrity() == []
    return fleet


def answer(fleet: FleetResidency, prompt: list[int], extras: PromptExtras = NO_EXTRAS) -> EngineHit:
    return fleet.predict(Prompt(prompt, extras), ["a"])["a"]


def hit(fleet: FleetResidency, prompt: list[int]) -> int:
    return answer(fleet, prompt).hit_tokens


PROMPT = tokens(200)
HASHES = DENSE.hashes(PROMPT)


class TestOrderAndCopies:
    def test_events_of_a_batch_apply_in_order(self) -> None:
        stored = DENSE.stored(PROMPT)
        assert hit(told(fleet_of(), stored, removed(*HASHES)), PROMPT) == 0
        assert hit(told(fleet_of(), stored, removed(*HASHES), stored), PROMPT) == 192
        assert hit(told(fleet_of(), stored, AllBlocksCleared(), DENSE.stored(PROMPT, stop=3)), PROMPT) == 48
        assert hit(told(fleet_of(), stored, DENSE.stored(PROMPT, stop=3), AllBlocksCleared()), PROMPT) == 0

    def test_copies_are_counted(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), DENSE.stored(PROMPT, start=4, stop=6))
        told(fleet, removed(HASHES[4]))
        assert hit(fleet, PROMPT) == 192
        told(fleet, removed(HASHES[4]))
        assert hit(fleet, PROMPT) == 64

    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_int_and_bytes_name_the_same_block(self, as_bytes: bool) -> None:
        """An engine that changes from one form to the other (a restart with other settings) loses nothing."""
        fleet = told(fleet_of(), Writer(SCHEME, as_bytes=as_bytes).stored(PROMPT))
        other = Writer(SCHEME, as_bytes=not as_bytes).hashes(PROMPT)
        told(fleet, removed(*other[6:]))
        assert hit(fleet, PROMPT) == 96
        assert fleet.stats().unknown_removals == 0

    def test_mixed_forms_in_one_event(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT))
        whole = Writer(SCHEME, as_bytes=True).hashes(PROMPT)
        told(fleet, removed(HASHES[5], whole[6], HASHES[7]))
        assert fleet.index.copies("a", GPU) == 9

    def test_told_copy_counts_are_taken_over(self) -> None:
        stored = DENSE.stored(PROMPT)
        fleet = told(fleet_of(), stored, stored)
        told(fleet, BlockRemoved([HASHES[5], HASHES[3]], "GPU", 0, remaining_copy_counts=[1, 0]))
        assert hit(fleet, PROMPT) == 48
        told(fleet, BlockRemoved([HASHES[5]], "GPU", 0, remaining_copy_counts=[0]))
        assert fleet.index.copies("a", GPU) == 10
        assert fleet.stats().unknown_removals == 0

    def test_a_count_may_be_left_out(self) -> None:
        stored = DENSE.stored(PROMPT)
        fleet = told(fleet_of(), stored, stored)
        told(fleet, BlockRemoved(HASHES[:2], "GPU", 0, remaining_copy_counts=[None, 0]))
        assert hit(fleet, PROMPT) == 16

    def test_counts_of_another_length_are_ignored(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT))
        told(fleet, BlockRemoved(HASHES[:2], "GPU", 0, remaining_copy_counts=[7]))
        assert fleet.index.copies("a", GPU) == 10

    def test_removals_before_any_store_are_counted(self) -> None:
        fleet = told(fleet_of(), removed(*HASHES), removed(*HASHES, group=5))
        assert fleet.stats().unknown_removals == 24
        assert hit(told(fleet, DENSE.stored(PROMPT)), PROMPT) == 192

    def test_blocks_of_unknown_parents_count_as_soon_as_what_is_before_them_does(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(tokens(50, seed=9)), DENSE.stored(PROMPT, start=4))
        assert hit(fleet, PROMPT) == 0
        assert hit(told(fleet, DENSE.stored(PROMPT, stop=4)), PROMPT) == 192


def by(owner: str | None, *, medium: str = "CPU", start: int = 4, stop: int | None = None) -> BlockStored:
    """The prompt's blocks from ``start`` on, as a connector tells of them; vLLM's own tells no tokens."""
    stored = DENSE.stored(PROMPT, start=start, stop=stop)
    stored.medium, stored.ownership, stored.locality = medium, owner, "LOCAL"
    if owner is None:
        stored.token_ids, stored.block_size = encode_tokens([]), 0
    return stored


def as_chunk(start: int, stop: int) -> BlockStored:
    """A chunk of vLLM's own offloading with ``self_describing_kv_events`` (v1/offloading/events.py, 0.33)."""
    stored = DENSE.stored(PROMPT, start=start, stop=stop)
    stored.medium, stored.locality = "CPU", "LOCAL"
    return stored


class TestSharedStores:
    def fleet(self, **facts: Any) -> FleetResidency:
        """``a`` wrote the prompt's second part to a store, ``b`` holds the first part."""
        wrote = by("redis", medium="STORAGE")
        wrote.locality = "REMOTE"
        fleet = told(fleet_of(**facts), DENSE.stored(PROMPT, stop=4), wrote)
        return told(fleet, DENSE.stored(PROMPT, stop=4), engine_id="b")

    def storage(self, fleet: FleetResidency, engine_id: str) -> int:
        return fleet.predict(Prompt(PROMPT), [engine_id])[engine_id].storage_tokens

    def test_a_writer_of_a_store_loads_from_it(self) -> None:
        fleet = self.fleet()
        assert (self.storage(fleet, "a"), self.storage(fleet, "b")) == (128, 0)
        other = by("redis", medium="STORAGE", start=11)
        other.locality = "REMOTE"
        told(fleet, other, engine_id="b")
        assert self.storage(fleet, "b") == 128, "what a wrote, too"

    def test_so_does_an_engine_that_is_configured_to(self) -> None:
        fleet = self.fleet(shared_stores=("redis",))
        assert self.storage(fleet, "b") == 128
        found = fleet.predict(Prompt(PROMPT), ["b"])["b"]
        assert found.hit_tokens == 64, "what lies on its GPU stays exact"

    def test_an_engine_that_said_nothing_yet_loads_what_others_wrote(self) -> None:
        wrote = by("redis", medium="STORAGE", start=0)
        wrote.locality = "REMOTE"
        fleet = told(fleet_of(shared_stores=("redis",)), DENSE.stored(PROMPT, stop=4), wrote)
        fleet.engine("new")
        found = fleet.predict(Prompt(PROMPT), ["new"])["new"]
        assert (found.mode, found.hit_tokens, found.storage_tokens) == ("native", 0, 192)
        assert (
            told(fleet_of(), DENSE.stored(PROMPT)).predict(Prompt(PROMPT), ["new"])["new"].mode == "unknown"
        )

    def miss(self, fleet: FleetResidency, engine_id: str, at: int, asked_s: float) -> None:
        """A receipt, a second after the engine was asked."""
        fleet.residency(engine_id).not_delivered(HASHES, at, 16, asked_s=asked_s, now=asked_s + 1.0)

    @pytest.mark.parametrize("locality", ["LOCAL", "REMOTE"])
    def test_blocks_that_storage_does_not_deliver_a_second_time_are_forgotten(self, locality: str) -> None:
        """The first time the engine computes it, stores it again, and says so, before its receipt comes."""
        wrote = by("redis", medium="STORAGE")
        wrote.locality = locality
        fleet = told(fleet_of(shared_stores=("redis",)), DENSE.stored(PROMPT, stop=4), wrote)
        told(fleet, DENSE.stored(PROMPT, stop=4), engine_id="b")
        for asked_s in (0.0, 0.5, 0.9):  # all were asked before the first miss was known
            self.miss(fleet, "a", 96, asked_s)
        assert self.storage(fleet, "a") == 128
        self.miss(fleet, "a", 96, 2.0)
        assert self.storage(fleet, "a") == 32, "up to the block that is missing"
        assert self.storage(fleet, "b") == (32 if locality == "REMOTE" else 0)
        told(fleet, wrote)
        assert self.storage(fleet, "a") == 128, "stored again"
        assert fleet.check_integrity() == []

    def test_another_engine_forgets_what_all_share_and_keeps_its_own_disk(self) -> None:
        own, shared = by("disk", medium="STORAGE"), by("redis", medium="STORAGE")
        shared.locality = "REMOTE"
        fleet = told(fleet_of(shared_stores=("redis",)), DENSE.stored(PROMPT, stop=4), own)
        told(fleet, DENSE.stored(PROMPT, stop=4), shared, engine_id="b")
        for asked_s in (0.0, 2.0):
            self.miss(fleet, "b", 64, asked_s)
        assert (self.storage(fleet, "a"), self.storage(fleet, "b")) == (128, 0)

    def test_blocks_that_were_missed_once_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvatlas.router.index.model._MISSED_MAX", 3)
        fleet = self.fleet()
        for number, at in enumerate((64, 80, 96, 112, 64)):
            self.miss(fleet, "a", at, 2.0 * number)
        assert self.storage(fleet, "a") == 128, "the first one was forgotten as missed"
        assert len(fleet._missed) == 3

    def test_old_hints_expire(self) -> None:
        fleet = self.fleet(shared_store_ttl_s=100.0)
        for now in (0.0, 50.0, 99.0):
            fleet.age(now)
            assert self.storage(fleet, "a") == 128
        fleet.age(100.0)
        assert (self.storage(fleet, "a"), hit(fleet, PROMPT)) == (0, 64)


class TestGroupsAndMedia:
    def test_no_group_is_group_0(self) -> None:
        fleet = told(fleet_of(), Writer(SCHEME, group=None).stored(PROMPT))
        assert hit(fleet, PROMPT) == 192
        told(fleet, removed(HASHES[4]), removed(HASHES[3], group=None))
        assert hit(fleet, PROMPT) == 48
        told(fleet, DENSE.stored(PROMPT, start=3, stop=5))
        assert hit(fleet, PROMPT) == 192

    def test_no_medium_is_the_gpu(self) -> None:
        stored = DENSE.stored(PROMPT)
        stored.medium = None
        fleet = told(fleet_of(), stored)
        assert hit(fleet, PROMPT) == 192
        assert hit(told(fleet, removed(HASHES[0], medium=None)), PROMPT) == 0

    def test_offloaded_blocks_are_distinguished(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT, stop=4), by(None))
        found = answer(fleet, PROMPT)
        assert (found.hit_tokens, found.offloaded_tokens) == (64, 192)
        told(fleet, removed(HASHES[8], medium="CPU"), removed(HASHES[9], medium="STORAGE"))
        assert answer(fleet, PROMPT).offloaded_tokens == 128

    def test_offload_events_teach_no_layout(self) -> None:
        offloaded = BlockStored(HASHES[:2], None, encode_tokens([]), 0, None, "STORAGE", None)
        fleet = told(fleet_of(), offloaded)
        assert fleet.engine("a").layout is None
        assert fleet.index.copies("a", Plane("STORAGE", 0)) == 2
        assert not fleet.engine("a").rejected

    @pytest.mark.parametrize(("stop", "loads"), [(3, 0), (4, 64), (6, 64), (8, 128), (12, 128)])
    def test_chunks_of_vllms_own_offloading_are_loaded_whole(self, stop: int, loads: int) -> None:
        """A shared prefix of 48 tokens loads nothing from chunks of four blocks."""
        chunks = [as_chunk(start, start + 4) for start in (0, 4)]
        other = PROMPT[: stop * 16] + tokens(100, seed=5)
        fleet = told(fleet_of(), DENSE.stored(PROMPT), *chunks, AllBlocksCleared())
        assert answer(fleet, other).cpu_tokens == loads
        assert fleet.index.physical("a", "CPU") == 2, "a chunk has one key"
        layout = fleet.engine("a").layout
        assert layout is not None
        assert layout.blocks_per_chunk == 4
        told(fleet, removed(*HASHES[:8], medium="CPU"))
        assert answer(fleet, other).cpu_tokens == 0
        assert fleet.stats().unknown_removals == 0

    def test_chunks_of_one_hash(self) -> None:
        """As vLLM #57304 would publish them."""
        chunk = as_chunk(0, 4)
        chunk.block_hashes, chunk.block_size = chunk.block_hashes[-1:], 64
        fleet = told(fleet_of(), DENSE.stored(PROMPT), chunk, AllBlocksCleared())
        assert answer(fleet, PROMPT).cpu_tokens == 64
        fleet.stage("a", batch(DENSE.stored(PROMPT), by(None, start=3, stop=4), AllBlocksCleared()))
        fleet.adopt("a")
        assert answer(fleet, PROMPT).cpu_tokens == 64, "the size is known from before the snapshot"

    def test_chunks_that_events_do_not_show_are_configured_or_stated(self) -> None:
        events = [DENSE.stored(PROMPT), by(None, start=3, stop=4), AllBlocksCleared()]
        assert answer(told(fleet_of(blocks_per_chunk=4), *events), PROMPT).cpu_tokens == 64
        for stated in ({"blocks_per_chunk": 4}, {"chunk_tokens": 64}):
            fleet = told(fleet_of(), *events)
            assert answer(fleet, PROMPT).cpu_tokens == 0
            statement = EngineStatement(source="server_info", **stated)
            fleet.engine("a").learn_setup(SetupEvidence(statements=(statement,)))
            assert answer(fleet, PROMPT).cpu_tokens == 64

    def test_owners_of_one_medium_do_not_cancel_each_other(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT, stop=4), *(by(o) for o in ("host", None)))
        gone = removed(*HASHES[4:], medium="CPU")
        assert answer(told(fleet, gone), PROMPT).cpu_tokens == 128, "the other owner still holds them"
        gone.ownership = "host"
        assert answer(told(fleet, gone), PROMPT).cpu_tokens == 0
        assert fleet.stats().unknown_removals == 0

    def test_a_restart_takes_everything_outside_too(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT, stop=4), by("host"), by("s", medium="STORAGE"))
        fleet.forget("a")
        assert fleet.stats().residencies == 0
        assert answer(told(fleet, DENSE.stored(PROMPT, stop=4)), PROMPT).offloaded_tokens == 64

    def test_a_reset_leaves_what_lies_outside(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), by("host", start=0), AllBlocksCleared())
        found = answer(fleet, PROMPT)
        assert (found.hit_tokens, found.cpu_tokens) == (0, 192)

    def test_a_snapshot_knows_owners(self) -> None:
        ledger = SnapshotLedger()
        told_before = [DENSE.stored(PROMPT, stop=4), by("host"), by(None), by("redis", medium="STORAGE")]
        told_before[-1].locality = "REMOTE"
        ledger.apply(batch(*told_before))
        snapshot = ledger.snapshot()
        while snapshot.step():
            pass
        fleet = fleet_of()
        for chunk in snapshot.chunks:
            fleet.stage("a", decode_batch(chunk))
        fleet.adopt("a")
        assert fleet.engine("a").stores == {"redis"}
        gone = removed(*HASHES[4:], medium="CPU")
        told(fleet, gone)
        assert answer(fleet, PROMPT).cpu_tokens == 128
        gone.ownership = "host"
        found = answer(told(fleet, gone), PROMPT)
        assert (found.cpu_tokens, found.storage_tokens) == (0, 128)

    def test_a_reset_clears_the_gpu_alone(self) -> None:
        offloaded = by(None, start=0)
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT), offloaded, AllBlocksCleared())
        assert fleet.index.copies("a", Plane("GPU", 1)) == 0
        assert fleet.index.copies("a", Plane("CPU", 0)) == 12
        assert fleet.engine("a").scheme == SCHEME, "what is known of the engine stays"

    def test_sleep_empties_the_host_memory_of_vllms_own_connector(self) -> None:
        """Others publish what they drop."""
        fleet = told(fleet_of(), DENSE.stored(PROMPT), by(None, start=0), by("host", start=0))
        fleet.engine("a").clear(connector=True)
        assert fleet.index.physical("a", "CPU") == 0
        assert fleet.index.physical("a", "CPU@host") == 12

    def test_a_block_of_host_memory_that_is_stored_again_after_a_reset_shows_that_it_was_emptied(
        self,
    ) -> None:
        """``/pause`` and ``/sleep`` reset vLLM's OffloadingConnector, which publishes nothing of it."""
        fleet = told(fleet_of(), DENSE.stored(PROMPT), by(None, start=0), AllBlocksCleared())
        assert fleet.index.physical("a", "CPU") == 12, "a reset of the GPU alone"
        told(fleet, by(None, start=0, stop=2))
        assert fleet.index.physical("a", "CPU") == 2
        told(fleet, removed(*HASHES[:2], medium="CPU"))
        assert fleet.index.physical("a", "CPU") == 0

    def test_a_reset_that_the_router_passed_on(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT))
        fleet.engine("a").clear()
        assert hit(fleet, PROMPT) == 0
        assert hit(told(fleet, AllBlocksCleared(), DENSE.stored(PROMPT)), PROMPT) == 192

    def test_groups_are_learned_as_they_show(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT))
        assert hit(fleet, PROMPT) == 192
        told(fleet, SPARSE.stored(PROMPT, keep=[4, 5, 6, 7]))
        layout = fleet.engine("a").layout
        assert layout is not None
        assert [c.label for c in layout.classes] == ["full_attention/16", "sliding_window/16 w64"]
        assert hit(fleet, PROMPT) == 128

    def test_the_block_size_is_the_largest_seen(self) -> None:
        """A partial block comes with the hash block's size, perhaps before any whole block."""
        fine = Writer(HashScheme(), size=16)
        fleet = told(fleet_of(), fine.stored(PROMPT, start=2, stop=3))
        told(fleet, Writer(SCHEME, size=64).stored(PROMPT))
        layout = fleet.engine("a").layout
        assert layout is not None
        assert (layout.groups[0].block_size, layout.hash_block_size) == (64, 16)
        assert hit(fleet, PROMPT) == 192

    def test_kinds_and_windows_may_come_from_configuration(self) -> None:
        """vLLM 0.20 and 0.21 publish groups without kinds."""
        fleet = fleet_of(kinds={1: WINDOW}, windows={1: 64})
        plain = [Writer(SCHEME, group=group, kind=None) for group in (0, 1)]
        told(fleet, plain[0].stored(PROMPT), plain[1].stored(PROMPT, keep=[4, 5, 6, 7]))
        assert hit(fleet, PROMPT) == 128
        assert fleet.engine("a").assumed_kinds == {0}

    @pytest.mark.parametrize(
        ("kind", "missing"),
        [("sliding_window", "windows.1"), ("chunked_local_attention", "attention_chunk_size")],
    )
    def test_a_missing_fact_is_named(self, kind: str, missing: str) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), Writer(SCHEME, group=1, kind=kind).stored(PROMPT))
        found = answer(fleet, PROMPT)
        assert (found.mode, found.hit_tokens) == ("unknown", 0)
        assert missing in found.why_unknown
        assert fleet.engine("a").layout.missing_facts == (missing,)

    def test_groups_may_have_chunks_of_their_own(self) -> None:
        """At 192 a chunk of 64 starts and needs nothing; one of 128 needs the four blocks before it."""
        kind = "chunked_local_attention"
        groups = [Writer(SCHEME, group=group, kind=kind) for group in (1, 2)]
        events = (
            DENSE.stored(PROMPT),
            groups[0].stored(PROMPT, keep=[]),
            groups[1].stored(PROMPT, keep=[8, 9]),
        )
        hits = {
            sizes: hit(
                told(fleet_of(attention_chunk_size=64, attention_chunk_sizes=dict(sizes)), *events), PROMPT
            )
            for sizes in ((), ((2, 128),), ((1, 128), (2, 64)))
        }
        assert hits == {(): 192, ((2, 128),): 128, ((1, 128), (2, 64)): 128}
        assert hit(told(fleet_of(attention_chunk_sizes={2: 64}), *events), PROMPT) == 0

    def test_a_chunk_of_no_whole_blocks_is_named_too(self) -> None:
        writer = Writer(SCHEME, kind="chunked_local_attention")
        fleet = told(fleet_of(attention_chunk_size=24), writer.stored(PROMPT))
        assert "attention_chunk_size" in answer(fleet, PROMPT).why_unknown

    def test_engines_of_different_layouts_in_one_fleet(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT, keep=[2, 3, 4, 5]))
        told(fleet, DENSE.stored(PROMPT), engine_id="b")
        coarse = Writer(HashScheme(algo="sha256_cbor", hash_block_size=32))
        told(fleet, coarse.stored(PROMPT), engine_id="c")
        told(fleet, Writer(HashScheme(hash_block_size=64)).stored(PROMPT), engine_id="d")
        hits = fleet.predict(Prompt(PROMPT), ["a", "b", "c", "d", "nobody"], detail=True)
        assert [hits[e].hit_tokens for e in "abcd"] == [96, 192, 192, 192]
        assert [hits[e].alignment for e in "abcd"] == [16, 16, 32, 64]
        assert hits["nobody"].mode == "unknown"
        assert [c.hit_tokens for c in hits["a"].by_class] == [192, 96]

    def test_a_hundred_engines(self) -> None:
        fleet, names = fleet_of(), [f"engine-{number}" for number in range(100)]
        for number, name in enumerate(names):
            told(fleet, DENSE.stored(PROMPT, stop=1 + number % 12), engine_id=name)
        hits = fleet.predict(Prompt(PROMPT), names)
        assert [hits[name].hit_tokens for name in names] == [16 * (1 + n % 12) for n in range(100)]

    def test_very_long_prompts(self) -> None:
        prompt = tokens(200_000)
        fleet = told(fleet_of(), DENSE.stored(prompt), SPARSE.stored(prompt, keep=range(9000, 9500)))
        assert hit(fleet, prompt) == 9500 * 16


class TestRestart:
    def test_nothing_said_before_holds(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT))
        fleet.forget("a")
        assert answer(fleet, PROMPT).hit_tokens == 0
        assert fleet.engine("a").layout is None
        assert fleet.engine("a").detection is Detection.WAITING
        assert fleet.stats().residencies == 0

    def test_until_its_scheme_is_known_again_the_old_one_is_used(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT))
        fleet.forget("a")
        told(fleet, DENSE.stored(PROMPT, start=1), SPARSE.stored(PROMPT, start=1))
        assert fleet.engine("a").detection is Detection.WAITING
        told(fleet, *[writer.stored(PROMPT, stop=1, parent=12345) for writer in (DENSE, SPARSE)])
        found = answer(fleet, PROMPT)
        assert (found.mode, found.hit_tokens) == ("native", 192)

    def test_the_groups_it_had_are_expected(self) -> None:
        """A prompt too short to show every group must not be predicted as if there were no others."""
        coarse = Writer(SCHEME, group=1, kind="mamba", size=64)
        facts = {"mamba_cache_mode": "all"}
        fleet = told(fleet_of(**facts), DENSE.stored(PROMPT), coarse.stored(PROMPT))
        fleet.forget("a")
        told(fleet, DENSE.stored(PROMPT, stop=3))
        assert fleet.engine("a").detection is Detection.NATIVE
        assert hit(fleet, PROMPT) == 0
        told(fleet, DENSE.stored(PROMPT, start=3), coarse.stored(PROMPT, keep=[1]))
        assert hit(fleet, PROMPT) == 128

    def test_an_expected_group_that_stays_silent_is_given_up(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT))
        fleet.forget("a")
        for seed in range(20):
            told(fleet, DENSE.stored(tokens(100, seed=seed)))
        assert hit(fleet, tokens(100, seed=1)) == 96

    @pytest.mark.parametrize(
        "other",
        [
            Writer(SCHEME, kind="mla_attention"),
            Writer(SCHEME, size=32),
            Writer(SCHEME, kind=WINDOW, window=32),
        ],
        ids=["kind", "block size", "window"],
    )
    def test_expectations_end_where_an_event_contradicts(self, other: Writer) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT))
        fleet.forget("a")
        told(fleet, other.stored(PROMPT))
        layout = fleet.engine("a").layout
        assert layout is not None
        assert len(layout.groups) == 1
        assert layout.groups[0].block_size == other.size
        assert hit(fleet, PROMPT) == 192

    def test_smaller_blocks_after_a_restart_are_seen(self) -> None:
        fleet = told(fleet_of(), Writer(SCHEME, size=64).stored(PROMPT))
        fleet.forget("a")
        told(fleet, DENSE.stored(PROMPT, stop=1))
        told(fleet, DENSE.stored(PROMPT, start=1))
        assert hit(fleet, PROMPT) == 192
        assert answer(fleet, PROMPT).alignment == 16

    def test_a_partial_block_confirms_nothing(self) -> None:
        coarse = Writer(SCHEME, size=64)
        fleet = told(fleet_of(), coarse.stored(PROMPT))
        fleet.forget("a")
        told(fleet, DENSE.stored(PROMPT, start=1, stop=2), coarse.stored(PROMPT))
        assert answer(fleet, PROMPT).alignment == 64

    def test_a_second_restart_before_any_event(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT))
        fleet.forget("a")
        fleet.forget("a")
        told(fleet, DENSE.stored(PROMPT, stop=3))
        assert hit(fleet, PROMPT) == 0, "the window group is still expected"

    def test_another_scheme_after_a_restart(self) -> None:
        fleet = told(fleet_of(hash_seeds=("7",)), DENSE.stored(PROMPT))
        fleet.forget("a")
        other = HashScheme(seed="7")
        told(fleet, Writer(other).stored(PROMPT))
        assert fleet.engine("a").scheme == other
        assert hit(fleet, PROMPT) == 192

    def test_a_remembered_scheme_is_not_mixed_with_a_layout_of_other_hash_blocks(self) -> None:
        fleet = told(fleet_of(), Writer(SCHEME, size=64).stored(PROMPT))
        fleet.remove("a")
        told(fleet, Writer(HashScheme(seed="x", hash_block_size=32)).stored(PROMPT, start=1), engine_id="b")
        found = fleet.predict(Prompt(PROMPT), ["b"])["b"]
        assert (found.mode, found.hit_tokens) == ("learned", 0)

    def test_an_engine_that_left_is_unknown(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT))
        fleet.remove("a")
        assert answer(fleet, PROMPT).why_unknown == "no events yet"

    def test_an_engine_without_events_knows_nothing(self) -> None:
        fleet = fleet_of()
        fleet.engine("a")
        assert answer(fleet, PROMPT).why_unknown == "no stored blocks seen yet"

    def test_scopes_forget_an_engine_that_changes_its_model(self) -> None:
        scopes = ModelIndexes(lambda model: ModelFacts())
        scopes.assign("a", "model-1")
        scopes.apply("a", batch(DENSE.stored(PROMPT)))
        scopes.assign("a", "model-1")
        assert scopes.scope("model-1").stats().residencies == 12
        scopes.assign("a", "model-2")
        assert scopes.scope("model-1").stats().residencies == 0
        scopes.apply("a", batch(DENSE.stored(PROMPT)))
        assert scopes.scope("model-2").stats().residencies == 12
        scopes.forget("a")
        assert scopes.scope("model-2").stats().residencies == 0
        scopes.forget("nobody")
        scopes.remove("nobody")


class TestFullReports:
    def test_a_re_report_of_a_hit_adds_no_copy(self) -> None:
        fleet = fleet_of(report_mode_full=True)
        told(fleet, DENSE.stored(PROMPT), DENSE.stored(PROMPT, stop=5), DENSE.stored(PROMPT))
        assert fleet.engine("a").re_reports == 2
        assert fleet.stats().extra_copies == 0
        told(fleet, removed(*HASHES[4:]))
        assert hit(fleet, PROMPT) == 64

    def test_a_genuine_store_from_the_start_counts(self) -> None:
        fleet = fleet_of(report_mode_full=True)
        told(fleet, DENSE.stored(PROMPT), removed(*HASHES[2:]), DENSE.stored(PROMPT, stop=5))
        assert fleet.stats().extra_copies == 2
        assert fleet.engine("a").re_reports == 0

    def test_stores_of_one_request_are_judged_by_the_first_of_them(self) -> None:
        """Once its other groups are stored, a chunk's start needs nothing more, and a window that was left
        whole hits: judged alone, the last group's store would be taken for a report."""
        groups = {0: FULL, 1: WINDOW, 2: WINDOW, 3: CHUNKED}
        writers = [
            Writer(SCHEME, group=idx, kind=kind, window=64 if kind == WINDOW else None)
            for idx, kind in groups.items()
        ]
        fleet = fleet_of(report_mode_full=True, attention_chunk_size=64)
        told(fleet, *(writer.stored(PROMPT[:128]) for writer in writers))
        told(fleet, removed(*HASHES[:8], group=1), removed(*HASHES[:8], group=3))
        assert hit(fleet, PROMPT[:129]) == 0
        told(fleet, *(writer.stored(PROMPT[:128]) for writer in writers))
        assert fleet.engine("a").re_reports == 0
        told(fleet, *(writer.stored(PROMPT[:128]) for writer in writers))
        assert fleet.engine("a").re_reports == len(groups)
        assert hit(fleet, PROMPT[:129]) == 128

    @pytest.mark.parametrize("left_out", ["a block", "a group"])
    def test_a_store_that_leaves_something_out_is_no_report(self, left_out: str) -> None:
        full, states = Writer(SCHEME, kind=FULL), Writer(SCHEME, group=1, kind=MAMBA)
        fleet = fleet_of(report_mode_full=True, mamba_cache_mode="align")
        told(fleet, full.stored(PROMPT[:96]), states.stored(PROMPT[:96], keep=(5,)))
        again = [full.stored(PROMPT[:96])]
        if left_out == "a block":
            again.append(states.stored(PROMPT[:96], keep=(5,)))
        told(fleet, *again)
        assert fleet.engine("a").re_reports == 0
        told(fleet, full.stored(PROMPT[:96]), states.stored(PROMPT[:96]))
        assert fleet.engine("a").re_reports == 2

    def test_a_report_is_known_without_the_hash_scheme(self) -> None:
        strange = Writer(HashScheme(seed="drawn at random"), kind=FULL)
        fleet = told(fleet_of(report_mode_full=True), strange.stored(PROMPT), strange.stored(PROMPT))
        assert fleet.engine("a").re_reports == 1

    def test_a_report_of_a_drafter_is_known_although_its_next_block_is_not_named(self) -> None:
        fleet = fleet_of(report_mode_full=True, eagle_groups="all")
        told(fleet, DENSE.stored(PROMPT), DENSE.stored(PROMPT, stop=5))
        assert fleet.engine("a").re_reports == 1

    def test_a_report_is_known_although_its_first_block_was_counted_too_low(self) -> None:
        """A prompt of one block that is computed again publishes what a report of its hit would."""
        fleet = told(fleet_of(report_mode_full=True), DENSE.stored(PROMPT))
        told(fleet, DENSE.stored(PROMPT[:16]), removed(HASHES[0]))
        told(fleet, DENSE.stored(PROMPT))
        assert fleet.engine("a").re_reports == 2
        assert fleet.stats().extra_copies == 0

    def test_only_where_the_operator_says_so(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), DENSE.stored(PROMPT))
        assert fleet.stats().extra_copies == 12

    def test_a_layout_that_lacks_a_fact_is_no_trouble(self) -> None:
        fleet = fleet_of(report_mode_full=True)
        writer = Writer(SCHEME, kind=WINDOW)
        told(fleet, writer.stored(PROMPT), writer.stored(PROMPT))
        assert fleet.index.copies("a", GPU) == 12


def refused(change: dict[str, Any]) -> BlockStored:
    event = DENSE.stored(tokens(200, seed=77))
    for name, value in change.items():
        setattr(event, name, value)
    return event


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"medium": "FLOPPY"}, "unknown_medium"),
            ({"medium": ""}, None),
            ({"kv_cache_spec_kind": "quantum", "group_idx": 3}, "unknown_kind"),
            ({"block_size": 0}, "tokens_do_not_fill_blocks"),
            ({"block_size": 1 << 31}, "tokens_do_not_fill_blocks"),
            ({"block_size": 17}, "tokens_do_not_fill_blocks"),
            ({"token_ids": encode_tokens([1, 2, 3]), "group_idx": 3}, "tokens_do_not_fill_blocks"),
        ],
    )
    def test_a_stored_event_that_makes_no_sense_costs_itself_only(
        self, change: dict[str, Any], reason: str | None
    ) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT), SPARSE.stored(PROMPT))
        layout, stats = fleet.engine("a").layout, fleet.stats()
        told(fleet, refused(change), DENSE.stored(tokens(64, seed=5)))
        assert fleet.engine("a").layout == layout
        if reason is not None:
            assert fleet.engine("a").rejected == {reason: 1}
            assert fleet.stats().blocks == stats.blocks + 4
        assert hit(fleet, PROMPT) == 192
        assert fleet.engine("a").detection is Detection.NATIVE

    def test_a_removal_that_makes_no_sense(self) -> None:
        fleet = told(fleet_of(), DENSE.stored(PROMPT))
        told(fleet, removed(*HASHES, medium="FLOPPY"), removed(*HASHES, group=63), removed())
        assert hit(fleet, PROMPT) == 192
        assert fleet.engine("a").rejected == {"unknown_medium": 1}
        assert fleet.stats().unknown_removals == 12

    def test_rejected_events_of_a_batch_are_counted(self) -> None:
        fleet = fleet_of()
        bad = batch(DENSE.stored(PROMPT))
        bad.rejected = ["no such type", "no such type"]
        fleet.apply("a", bad)
        assert fleet.engine("a").rejected == {"undecodable": 2}
        assert hit(fleet, PROMPT) == 192

    def test_the_memory_of_planes_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(residency, "_SETTLED_MAX", 5)
        fleet = fleet_of()
        for size in range(1, 40):
            offloaded = BlockStored(HASHES[:1], None, encode_tokens([]), size, None, "CPU", None)
            told(fleet, offloaded)
        assert len(fleet.engine("a")._settled) <= 5
        assert hit(told(fleet, DENSE.stored(PROMPT)), PROMPT) == 192

    def test_every_kind_vllm_knows_is_known(self) -> None:
        for kind in ("full_attention", "mla_attention", "sink_full_attention"):
            fleet = told(fleet_of(), Writer(SCHEME, kind=kind).stored(PROMPT))
            layout = fleet.engine("a").layout
            assert layout is not None
            assert layout.classes[0].family is Family.FULL
            assert hit(fleet, PROMPT) == 192


hashes_strategy = st.lists(
    st.integers(0, 30) | st.integers(0, (1 << 64) - 1) | st.binary(max_size=33), max_size=5
)
odd_stored = st.builds(
    BlockStored,
    hashes_strategy,
    st.none() | st.integers(0, 30) | st.binary(max_size=33),
    st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=70).map(encode_tokens),
    st.sampled_from([0, 1, 7, 16, 32, 1 << 31]),
    st.none(),
    st.sampled_from([None, "GPU", "CPU", "STORAGE", "", "tape"]),
    st.sampled_from([None, "sql", "x"]),
    extra_keys=st.none()
    | st.lists(st.none() | st.lists(st.integers() | st.text() | st.lists(st.text(), max_size=2)), max_size=4),
    group_idx=st.none() | st.integers(0, 63),
    kv_cache_spec_kind=st.sampled_from(
        [
            None,
            "full_attention",
            "sliding_window",
            "chunked_local_attention",
            "mamba",
            "cross_attention",
            "odd",
        ]
    ),
    kv_cache_spec_sliding_window=st.sampled_from([None, 0, 1, 64, 1 << 31]),
    lookahead_token_ids=st.none() | st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
)
odd_removed = st.builds(
    BlockRemoved,
    hashes_strategy,
    st.sampled_from([None, "GPU", "CPU", "tape"]),
    st.none() | st.integers(0, 63),
    remaining_copy_counts=st.none() | st.lists(st.none() | st.integers(0, 3), max_size=5),
)
odd_events = st.lists(odd_stored | odd_removed | st.builds(AllBlocksCleared), max_size=12)
odd_facts = st.builds(
    ModelFacts,
    attention_chunk_size=st.sampled_from([None, 1, 16, 24, 64]),
    mamba_cache_mode=st.sampled_from([None, "align", "all", "what"]),
    eagle_groups=st.sampled_from([(), (0,), (0, 1, 2)]),
    partial_hash_hits=st.sampled_from([None, True, False]),
    report_mode_full=st.booleans(),
    lora_paths=st.just({"sql": "/adapters/sql"}),
)


@settings(max_examples=examples(120))
@given(odd_facts, st.lists(odd_events, max_size=4), st.integers(0, 300))
def test_no_events_make_the_index_raise_or_lie(
    facts: ModelFacts, batches: list[list[Event]], num_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detect, "SEEDS_MAX", 2)
        fleet = FleetResidency(facts)
        for events in batches:
            fleet.apply("odd", batch(*events))
        told(fleet, DENSE.stored(PROMPT))
        found = fleet.predict(Prompt(tokens(num_tokens)), ["a", "odd"], detail=True)
    assert all(0 <= one.hit_tokens <= max(0, num_tokens - 1) for one in found.values())
    for name, hit_there in found.items():
        if (layout := fleet.engine(name).layout) is not None:
            hit = Hit(hit_there.hit_tokens, shared_prefix_tokens=hit_there.shared_prefix_tokens)
            for interval in (0, 10, 64, None):
                kept = kept_prefixes(kept_rule(layout), num_tokens, hit, interval)
                assert all(0 < span[0] <= span[-1] <= num_tokens // layout.hash_block_size for span in kept)
    assert fleet.index.check_integrity() == []
    if not facts.eagle_groups:
        assert found["a"].hit_tokens == min(192, max(0, num_tokens - 1) // 16 * 16), (
            "another engine's nonsense"
        )


def test_a_long_random_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores, removals, resets and restarts of several engines in any order never upset the counts."""
    rng, fleet = random.Random(3), fleet_of()
    prompts = [tokens(rng.randrange(20, 400), seed=n) for n in range(12)]
    for _ in range(600):
        name, prompt = rng.choice("abcd"), rng.choice(prompts)
        writer = rng.choice([DENSE, SPARSE])
        match rng.randrange(12):
            case 0:
                told(fleet, AllBlocksCleared(), engine_id=name)
            case 1:
                fleet.forget(name)
            case 2 | 3 | 4:
                some = [h for h in writer.hashes(prompt) if rng.random() < 0.5]
                told(fleet, removed(*some, group=writer.group), engine_id=name)
            case _:
                told(fleet, writer.stored(prompt), engine_id=name)
        for found in fleet.predict(Prompt(prompt), "abcd").values():
            assert found.hit_tokens <= len(prompt) - 1


def test_detail_tells_the_hit_of_each_class_medium_by_medium() -> None:
    outside = [by(None, medium=medium, start=0, stop=stop) for medium, stop in (("CPU", 4), ("STORAGE", 5))]
    events = [DENSE.stored(PROMPT, stop=2), *outside]
    hit = told(fleet_of(), *events).predict(Prompt(PROMPT), ["a"], detail=True)["a"]
    assert hit.by_class[0].by_medium == {"GPU": 32, "CPU": 64, "STORAGE": 80}
    assert (hit.hit_tokens, hit.offloaded_tokens) == (32, 80)


class TestManyEngines:
    def test_engines_of_several_schemes_are_found_together(self) -> None:
        fleet, other = fleet_of(), Writer(HashScheme(algo="sha256_cbor"))
        for engine_id, writer, stop in (
            ("a", DENSE, 12),
            ("b", DENSE, 12),
            ("c", other, 12),
            ("d", other, 4),
        ):
            told(fleet, writer.stored(PROMPT, stop=stop), engine_id=engine_id)
        found = fleet.predict(Prompt(PROMPT), ["a", "b", "c", "d"])
        assert {engine_id: one.hit_tokens for engine_id, one in found.items()} == {
            "a": 192,
            "b": 192,
            "c": 192,
            "d": 64,
        }

    @pytest.mark.parametrize("medium", ["GPU", "CPU"])
    def test_a_hit_is_of_the_engines_that_hold_it_alone(self, medium: str) -> None:
        fleet = fleet_of()
        stops = {"a": 6, "b": 3, "c": 6, "d": 0}
        for engine_id, stop in stops.items():
            told(fleet, DENSE.stored(PROMPT, start=10, stop=12), engine_id=engine_id)
            if stop:
                stored = DENSE.stored(PROMPT, stop=stop)
                told(fleet, by(None, start=0, stop=stop) if medium == "CPU" else stored, engine_id=engine_id)
        found = fleet.predict(Prompt(PROMPT), list(stops))
        held = {one: hit.hit_tokens + hit.cpu_tokens for one, hit in found.items()}
        assert held == {one: 16 * stop for one, stop in stops.items()}


@pytest.mark.parametrize(
    ("change", "continues"),
    [
        ({}, True),
        ({"group_idx": 0}, False),
        ({"group_idx": None}, False),
        ({"medium": None}, True),
        ({"medium": "CPU"}, False),
        ({"parent_block_hash": 7}, False),
    ],
)
def test_stores_of_one_request_come_group_after_group_from_its_first_token(
    change: dict[str, Any], continues: bool
) -> None:
    before, event = DENSE.stored(PROMPT), SPARSE.stored(PROMPT)
    for name, value in change.items():
        setattr(event, name, value)
    assert residency.continues_series(before, event) is continues
    assert not residency.continues_series(event, before)
    assert not residency.continues_series(before, removed(*HASHES))
    assert not residency.continues_series(AllBlocksCleared(), event)
