"""Two of vLLM's own P2P sessions that pull blocks from each other; runs under vLLM's interpreter.

    VLLM_PYTHON -m tests.vllm.drive_pull --params JSON --seed N

Only the wires are replaced: control messages go through lists, and blocks are copied between two arrays. The
source's host memory holds a part of the keys. Each target's block must end up with the content of its own key
or untouched. Prints one JSON line: counts, and the differences found.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob
from vllm.v1.kv_offload.tiering.p2p.control.base import ControlConnection
from vllm.v1.kv_offload.tiering.p2p.data.base import DataTransport, PollResult
from vllm.v1.kv_offload.tiering.p2p.manager import _parse_dest, _parse_source
from vllm.v1.kv_offload.tiering.p2p.session import P2PSession

BLOCKS, BLOCK_BYTES = 64, 16
SOURCE, TARGET = "10.0.0.1:5710", "10.0.0.2:5710"


class Wire(ControlConnection):
    """One end of a control connection."""

    def __init__(self, peer_id: str) -> None:
        super().__init__(peer_id)
        self.inbox: list[dict[str, Any]] = []
        self.other: Wire | None = None
        self._alive = True

    @property
    def alive(self) -> bool:
        return self._alive

    def send(self, msg: dict[str, Any]) -> None:
        if self.other is not None:
            self.other.inbox.append(msg)

    def recv(self) -> Sequence[dict[str, Any]]:
        found, self.inbox = self.inbox, []
        return found

    def mark_dead(self) -> None:
        self._alive = False

    def close(self) -> None:
        self._alive = False


class Memory(DataTransport):
    """Host memory of one engine; writes reach the other's immediately."""

    def __init__(self, config: dict[str, str]) -> None:
        self.blocks = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        super().__init__(memoryview(self.blocks), config)
        self.other: Memory | None = None
        self._done: list[int] = []
        self._count = 0

    def get_agent_metadata(self) -> bytes:
        return b"agent"

    def add_remote_peer(self, *_: Any, **__: Any) -> None:
        pass

    def remove_remote_peer(self, peer_id: str) -> None:
        pass

    def write_blocks(self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]) -> int | None:
        if self.other is None:
            return None
        self.other.blocks[remote_idxs] = self.blocks[local_idxs]
        self._count += 1
        self._done.append(self._count)
        return self._count

    def poll(self, peer_id: str | None = None) -> PollResult:
        done, self._done = self._done, []
        return PollResult(done=done, failed=[])

    def cancel(self, transfer_ids: Iterable[int], mode: str = "immediate") -> list[int]:
        return []

    def close(self) -> None:
        pass


def content(key: bytes) -> Any:
    return np.frombuffer(key.ljust(BLOCK_BYTES, b"."), np.uint8)


class Held(ParentManager):
    """The source's host memory by key; pinned blocks stay."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.at: dict[bytes, int] = {}
        self.pinned: set[int] = set()
        self._jobs = 0

    def store(self, key: bytes, block: int) -> None:
        self.evict(block)
        if block not in self.pinned:
            self.at[key] = block
            self.memory.blocks[block] = content(key)

    def evict(self, block: int) -> None:
        if block not in self.pinned:
            self.at = {key: at for key, at in self.at.items() if at != block}

    def on_new_request(self, req_context: ReqContext) -> Any:
        return None

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.at else LookupResult.MISS

    def create_store_job(self, keys: Collection[bytes], req_context: ReqContext) -> TransferJob:
        blocks = np.array([self.at[key] for key in keys])
        self.pinned.update(blocks.tolist())
        self._jobs += 1
        return TransferJob(self._jobs, list(keys), blocks, is_promotion=False, req_context=req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        pass


class Pair:
    def __init__(self, *, seed: str = "s", config: str = "m") -> None:
        wires = Wire(SOURCE), Wire(TARGET)
        wires[0].other, wires[1].other = wires[1], wires[0]
        self.memories = Memory({"model": "m"}), Memory({"model": config})
        self.memories[0].other = self.memories[1]
        self.held = Held(self.memories[0])
        self.source = P2PSession(TARGET, SOURCE, self.memories[0], BLOCK_BYTES, "s", wires[1])
        self.target = P2PSession(SOURCE, TARGET, self.memories[1], BLOCK_BYTES, seed, wires[0])

    def step(self) -> list[Any]:
        """One step of both schedulers; the finished loads of the target."""
        done = list(self.target.poll().loads)
        self.source.poll()
        self.source.serve_external_requests(self.held)
        self.target.flush_pending_lookups()
        return done


def pull(pair: Pair, rng: random.Random, name: str, keys: list[bytes]) -> list[str]:
    """One request: which keys it gets, and the differences."""
    answers: dict[bytes, bool | None] = {}
    for _ in range(9):
        answers = {key: pair.target.register_lookup(name, key) for key in keys}
        if None not in answers.values():
            break
        pair.step()
        for block in rng.sample(range(BLOCKS), 8):  # the source goes on storing and evicting
            pair.held.store(b"other%d" % rng.randrange(1000), block)
    found = [key for key in keys if answers[key]]
    blocks = rng.sample(range(BLOCKS), len(found))
    pair.memories[1].blocks[:] = 0
    differences = [f"{key!r} is unresolved" for key in keys if answers[key] is None]
    if found:
        pair.target.request_blocks(1, name, found, blocks)
        loads = [load for _ in range(9) for load in pair.step()]
        if [load.success for load in loads] != [True]:
            differences.append(f"{name}: loads {loads}")
        for key, block in zip(found, blocks, strict=True):
            if not (pair.memories[1].blocks[block] == content(key)).all():
                differences.append(f"{key!r} has other content")
    untouched = [block for block in range(BLOCKS) if block not in blocks]
    if pair.memories[1].blocks[untouched].any():
        differences.append(f"{name}: blocks that were not asked for have changed")
    pair.target.finish_request(name)
    pair.held.pinned.clear()
    return differences


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    params = json.loads(options.params)
    source = _parse_source(params)
    if source is None:
        raise SystemExit("vLLM reads no source")
    rng, differences, asked, got = random.Random(options.seed), list[str](), 0, 0
    for number in range(200):
        pair = Pair()
        keys = [b"k%d-%d" % (number, at) for at in range(rng.randrange(1, 20))]
        for at, key in enumerate(keys):
            if rng.random() < 0.6:
                pair.held.store(key, at)
        asked, got = asked + len(keys), got + len(pair.held.at)
        differences += pull(pair, rng, source.kv_request_id, keys)
    refused = {}
    for name, other in (("seed", {"seed": "t"}), ("config", {"config": "n"})):
        pair = Pair(**other)
        pair.held.store(b"k", 0)
        pair.target.register_lookup("r", b"k")
        for _ in range(9):
            pair.step()
        refused[name] = not pair.target.alive and pair.target.close().failed_req_ids == ["r"]
    told = {"peer": source.peer_id, "probes": source.do_probe, "serves": _parse_dest(params) is not None}
    print(json.dumps({**told, "asked": asked, "held": got, "refused": refused, "differences": differences}))


if __name__ == "__main__":
    main()
