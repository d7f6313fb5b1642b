"""Our connector under vLLM's real scheduler, on random load with small pools: no request reads wrong KV.

Preemption, chunked prefill, failed allocation, aborts during loads, resets, slow and failing transfers, and
two ranks that answer in different steps all happen; the sim asserts after each step, these tests at the end.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from tests.connectors.offload.sim_engine import Prompt, RequestStatus, Setup, SimConnector, SimEngineCore
from tests.publisher.pool.layouts import MIXES, UNITS
from tests.vllm.tiny_model import write_tiny_model

LAYOUTS = {
    name: (MIXES[name], UNITS.get(name))
    for name in (
        "full",
        "window",
        "gemma",
        "gpt_oss",
        "full_two_windows",
        "full_chunked_window",
        "coarse_full",
        "coarse_window",
        "odd_sizes",
        "three_sizes",
        "two_fulls",
        "mamba_align_alone",
        "mamba_align_equal",
        "mamba_align_coarse",
        "mamba_align_same_coarse",
        "full_two_windows_mamba",
        "mamba_align_window",
        "eagle_full",
        "eagle_hybrid",
        "eagle_mamba",
    )
}
"""Group mixes; where a unit is given, hits may end inside a block."""

LONGEST_PROMPT = 330
LONGEST_ANSWER = 40


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny-model")))


def run_load(core: SimEngineCore, seed: int, *, requests: int = 40) -> None:
    """Random prompts that share beginnings, aborts (also of requests that wait for a load) and resets."""
    rng = random.Random(seed)
    shared_prefixes = [[rng.randrange(3, 900) for _ in range(rng.randint(80, 260))] for _ in range(5)]
    asked: list[list[int]] = []
    live: list[Any] = []
    added = 0
    while added < requests or core.busy:
        if added < requests and rng.random() < 0.3:
            shared_prefix = rng.choice(shared_prefixes)
            kept = len(shared_prefix) if rng.random() < 0.6 else rng.randint(20, len(shared_prefix))
            own = [rng.randrange(3, 900) for _ in range(rng.randint(1, 70))]
            tokens = shared_prefix[:kept] + own
            if asked and rng.random() < 0.4:  # the same again, or the next turn
                tokens = [*rng.choice(asked), *own[: rng.choice((0, 0, 30))]][:LONGEST_PROMPT]
            asked.append(tokens)
            live.append(core.add(Prompt(tokens), rng.randint(1, LONGEST_ANSWER)))
            added += 1
        live = [request for request in live if not request.is_finished()]
        loading = [request for request in live if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if live and rng.random() < 0.02:
            core.abort(rng.choice(live))
        elif loading and rng.random() < 0.1:
            core.abort(rng.choice(loading))
        if rng.random() < 0.3:
            core.reset(connector=rng.random() < 0.05)
        core.step()
    core.check_idle()


def small_setup(layout: str) -> Setup:
    """A pool in which the longest request of ``run_load`` fits, and hardly a second one."""
    chunk = 96
    need = 0
    groups, unit = LAYOUTS[layout]
    for group in groups:
        kept = group.get("sliding_window") or group.get("attention_chunk_size") or LONGEST_PROMPT
        blocks = min(LONGEST_PROMPT + LONGEST_ANSWER, kept + chunk) // group["block_size"] + 3
        need += 6 if group["kind"] == "mamba" else blocks
    return Setup(
        groups=groups,
        num_blocks=need * 3 // 2 + 4,
        prefix_match_unit=unit,
        max_num_batched_tokens=chunk,
        max_num_seqs=6,
    )


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_right_kv(layout: str, steps_ahead: int, model: str) -> None:
    core = SimEngineCore(small_setup(layout), SimConnector(steps_ahead=steps_ahead), model, seed=1)
    run_load(core, seed=1)
    assert core.counts["loads"] > 0
    assert core.counts["failed_loads"] == 0, "the engine's tables did not fit a hit"


@pytest.mark.parametrize("seed", range(16))
def test_any_connector_under_any_load(seed: int, model: str) -> None:
    """Small and large tiers, several ranks, failing transfers, all policies: the sim finds nothing wrong."""
    rng = random.Random(seed)
    connector = SimConnector(
        host_blocks=rng.choice((8, 100, 400)),
        ranks=rng.choice((1, 2, 3)),
        failure_rate=rng.choice((0, 0.05, 0.2, 0.6)),
        name_failed_keys=rng.random() < 0.5,
        policy=rng.choice(("lru", "boundary", "hinted")),
        pinned_share=rng.choice((0.02, 0.1, 1.0)),
        load_failure_policy=rng.choice(("recompute", "recompute", "fail")),
        steps_ahead=rng.choice((0, 1)),
        extra=rng.choice(
            (
                {},
                {"store_generated": False},
                {"load_min_tokens": 64},
                {"store_threshold": 2},
            )
        ),
    )
    core = SimEngineCore(small_setup(rng.choice(list(LAYOUTS))), connector, model, seed)
    run_load(core, seed)


def one_request(core: SimEngineCore, tokens: list[int], max_tokens: int = 2) -> Any:
    request = core.add(Prompt(tokens), max_tokens)
    while not request.is_finished():
        core.step()
    return request


def drain(core: SimEngineCore) -> None:
    while core.busy:
        core.step()


TOKENS = [7 + i % 500 for i in range(200)]


def test_an_engine_without_requests_steps_until_its_stores_ended(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(), model, seed=3)
    core.engines[0].lazy = True
    one_request(core, TOKENS)
    for _ in range(20):
        core.step()
    assert core.busy
    assert core.half.has_pending_push_work()
    assert core.half.counts()["pinned_blocks"] > 0
    core.engines[0].lazy = False
    drain(core)
    assert core.half.counts() == {"requests": 0, "jobs": 0, "pinned_blocks": 0}
    assert core.events.held


def test_nothing_is_announced_or_loaded_before_every_rank_stored_it(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(ranks=2), model, seed=4)
    core.engines[1].lazy = True
    one_request(core, TOKENS)
    for _ in range(50):
        core.step()
    assert core.engines[0].idle
    assert not core.events.held
    core.engines[1].lazy = False
    drain(core)
    assert core.events.held


def test_a_failed_load_is_followed_by_computing_and_then_by_storing_again(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(), model, seed=5)
    one_request(core, TOKENS)
    drain(core)
    held = set(core.events.held)
    assert core.reset()
    core.engines[0].failure_rate = 1.0
    one_request(core, TOKENS)
    assert (core.counts["loads"], core.counts["failed_loads"]) == (1, 1)
    core.engines[0].failure_rate = 0.0
    drain(core)
    assert core.reset()
    one_request(core, TOKENS)
    drain(core)
    assert core.reset()
    one_request(core, TOKENS)
    drain(core)
    assert core.counts["loads"] == 2
    assert core.events.held == held


def test_with_policy_fail_a_failed_load_ends_its_request_only(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(load_failure_policy="fail"), model, seed=6)
    one_request(core, TOKENS)
    drain(core)
    assert core.reset()
    core.engines[0].failure_rate = 1.0
    request = one_request(core, TOKENS)
    assert request.status == RequestStatus.FINISHED_ERROR
    core.engines[0].failure_rate = 0.0
    assert one_request(core, TOKENS).status == RequestStatus.FINISHED_LENGTH_CAPPED
    core.check_idle()


def test_a_prompt_is_kept_when_enough_requests_had_it(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(extra={"store_threshold": 2}), model, seed=13)
    one_request(core, TOKENS)
    drain(core)
    assert not core.events.held
    one_request(core, [7] * 150)
    one_request(core, TOKENS)  # whether the GPU still has it or not
    drain(core)
    assert core.events.held
    assert core.reset()
    one_request(core, TOKENS)
    assert core.counts["loads"] == 1
    core.check_idle()


def test_a_reset_of_the_connector_also_spoils_what_is_on_its_way(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(), model, seed=7)
    core.engines[0].lazy = True
    one_request(core, TOKENS)
    assert not core.half.reset_cache(), "a store is under way"
    core.engines[0].lazy = False
    drain(core)
    assert not core.events.held
    assert core.reset(connector=True)
    one_request(core, TOKENS)
    assert core.counts["loads"] == 0


def test_no_more_than_the_cap_is_pinned_and_the_rest_follows_later(model: str) -> None:
    core = SimEngineCore(small_setup("full"), SimConnector(pinned_share=0.1), model, seed=8)
    cap = core.half._pins.blocks_max
    assert cap < len(TOKENS) // 16
    core.engines[0].lazy = True
    request = core.add(Prompt(TOKENS), 40)
    while request.num_output_tokens < 3:
        core.step()
    assert core.half.counts()["pinned_blocks"] == cap
    core.engines[0].lazy = False
    drain(core)
    assert len(core.events.held) >= len(TOKENS) // 16


def test_the_sim_would_notice_a_wrong_byte(model: str) -> None:
    """The control of this module: an engine that lies about one block of one load is found out."""
    core = SimEngineCore(small_setup("gemma"), SimConnector(), model, seed=9)
    one_request(core, TOKENS)
    drain(core)
    assert core.reset()
    slot, (key, content) = next(iter(core.engines[0].rows.items()))
    core.engines[0].rows[slot] = (key, {**content, 5: "another byte"})
    with pytest.raises(AssertionError, match="reads wrong KV"):
        one_request(core, TOKENS)


def test_events_carry_what_a_router_needs_of_every_group(model: str) -> None:
    core = SimEngineCore(small_setup("gemma"), SimConnector(), model, seed=10)
    one_request(core, TOKENS)
    drain(core)
    of_group = {index: [e for e in core.events.stored if e.group_idx == index] for index in range(6)}
    text = ",".join(map(str, TOKENS))
    for event in core.events.stored:
        assert event.block_size == 16
        assert len(event.token_ids) == 16 * len(event.block_hashes) == 16 * len(event.extra_keys)
        assert ",".join(map(str, event.token_ids)) in text
        assert (event.medium, event.locality, event.ownership) == ("CPU", "LOCAL", "kvatlas-host")
    window, full = of_group[0][0], of_group[5][0]
    assert (window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert window.parent_block_hash is not None
    assert (full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert full.parent_block_hash is None
    chain = [token for event in of_group[5] for token in event.token_ids]
    assert chain == TOKENS[: len(chain)]
