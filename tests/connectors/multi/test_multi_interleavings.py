"""Under random interleavings of loads, failures and saves on several ranks, no account goes wrong.

Both halves of the connector, fake children that end their jobs when they like, vLLM's own aggregation of
ranks, and messages that are pickled on the way, as between processes.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import pytest

from tests.support.examples import examples

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.connectors.multi.fake_children import child, multi, request

RANKS = 2


class World:
    """A scheduler's connector, a worker's per rank, and what must come out of them."""

    def __init__(self, rng: random.Random, children: int) -> None:
        self.rng = rng
        kinds = [child(f"c{index}") for index in range(children)]
        self.scheduler, self.accounts = multi(*kinds)
        self.workers = [multi(*kinds, role=KVConnectorRole.WORKER) for _ in range(RANKS)]
        self.aggregator = KVOutputAggregator(RANKS)
        self.running: list[dict[tuple[int, str, str], None]] = [{} for _ in range(RANKS)]
        self.made: Counter[tuple[int, str]] = Counter()
        self.expected_saves: dict[str, set[tuple[int, int]]] = {}
        self.loading: dict[str, int] = {}
        self.failed: set[str] = set()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self.seen_stats: Counter[str] = Counter()
        self.live: list[str] = []
        self.count = 0

    def act(self) -> None:
        """Something happens between two steps."""
        choice = self.rng.random()
        idle = [name for name in self.live if name not in self.loading]
        if choice < 0.4:
            self.count += 1
            name = f"r{self.count}"
            self.live.append(name)
            self.scheduler.on_new_request(request(name))
            self._admit(name)
        elif choice < 0.7 and idle:
            self._finish(self.rng.choice(idle))
        elif idle:
            self._admit(self.rng.choice(idle))

    def _admit(self, name: str) -> None:
        for account in self.accounts:
            tokens = self.rng.choice([0, 16, 32, None])
            account.offers[name] = (tokens, bool(tokens))
        offers = [account.offers[name][0] for account in self.accounts]
        answer = self.scheduler.get_num_new_matched_tokens(request(name), 0)
        if None in offers:
            assert answer == (None, False)
            return
        if name in self.failed:
            assert answer == (0, False)
        else:
            assert answer[0] == max(tokens for tokens in offers if tokens is not None)
        if self.rng.random() < 0.3:  # no room for it now
            return
        self.scheduler.update_state_after_alloc(request(name), None, answer[0] or 0)
        self.failed.discard(name)
        if answer[0]:
            self.loading[name] = RANKS

    def _finish(self, name: str) -> None:
        self.live.remove(name)
        savers = {index for index in range(len(self.accounts)) if self.rng.random() < 0.5}
        for index, account in enumerate(self.accounts):
            account.finish[name] = (index in savers, None)
        delayed, _ = self.scheduler.request_finished_all_groups(request(name), ([1],))
        assert delayed == bool(savers)
        if savers:
            self.expected_saves[name] = {(rank, index) for rank in range(RANKS) for index in savers}

    def step(self, *, drain: bool = False) -> None:
        metadata = pickle.dumps(self.scheduler.build_connector_meta(None))
        outputs = [self._rank(rank, pickle.loads(metadata), drain) for rank in range(RANKS)]
        merged = self.aggregator.aggregate(
            [ModelRunnerOutput([], {}, kv_connector_output=output) for output in outputs]
        ).kv_connector_output
        for name in merged.failed_recving:
            self.failed.add(name)
        for name in merged.finished_recving or ():
            self.received[name] += 1
            del self.loading[name]
        for name in merged.finished_sending or ():
            self.sent[name] += 1
            assert not self.expected_saves[name], "blocks are given up while a child saves them"
        if merged.kv_connector_stats is not None:
            report = self.scheduler.build_kv_connector_stats(merged.kv_connector_stats.to_dict())
            for name, part in report.data.items():
                self.seen_stats[name] += part.data.get("n", 0)
        self.scheduler.update_connector_output(merged)

    def _rank(self, rank: int, metadata: Any, drain: bool) -> KVConnectorOutput:
        worker, accounts = self.workers[rank]
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        for index, part in enumerate(metadata.metadata):
            for kind, names in (("load", part.loads), ("save", part.saves)):
                self.running[rank] |= {(index, kind, name): None for name in names}
        for job in list(self.running[rank]):
            if drain or self.rng.random() < 0.4:
                del self.running[rank][job]
                self._end(rank, accounts, *job)
        results = worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return pickle.loads(pickle.dumps(output))

    def _end(self, rank: int, accounts: list[Any], index: int, kind: str, name: str) -> None:
        account = accounts[index]
        if kind == "load":
            account.recving.add(name)
            if self.rng.random() < 0.3:
                account.failing.add(name)
        else:
            account.sending.add(name)
            self.expected_saves[name].discard((rank, index))
        account.ended[kind] += 1
        self.made[index, kind] += 1
        account.stats["n"] = account.stats.get("n", 0) + 1
        self.stats["Fake"] += 1


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 1 << 32), children=st.integers(1, 4))
def test_everything_is_answered_once_and_reaches_its_own(seed: int, children: int) -> None:
    world = World(random.Random(seed), children)
    for _ in range(world.rng.randint(5, 60)):
        if world.rng.random() < 0.6:
            world.act()
        else:
            world.step()
    for _ in range(3):
        world.step(drain=True)
    assert not world.loading
    assert not any(world.running)
    assert set(world.sent) == set(world.expected_saves)
    assert set(world.sent.values()) <= {1}
    for index, account in enumerate(world.accounts):
        for kind in ("load", "save"):
            assert account.answered[kind] == world.made[index, kind]
    assert world.seen_stats == world.stats
    for worker, _ in world.workers:
        assert not worker._extra_async_saves
    for name in list(world.live):
        world._finish(name)
    assert not world.scheduler._requests_to_connector
    assert not world.scheduler._tail_savers
