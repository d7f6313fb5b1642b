"""Which APIs of an engine keep salted prompts apart: proven by what it answers, never assumed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvatlas.router.fleet.engine_client import TOKENS_MAX, CacheReport, EngineClient, Verdict, numbers
from kvatlas.router.fleet.engines import EngineKind
from kvatlas.router.fleet.salt_proof import (
    AGAIN_S,
    AGAIN_S_MAX,
    FOREIGN,
    PROOF_S_MAX,
    SaltProof,
    SaltProver,
)
from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES, SALTED
from tests.world.seams import run

PROMPTS = (CHAT, COMPLETION, MESSAGES, RESPONSES, BATCH, GENERATE)
POOLED = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)


class FakeEngine:
    """An engine's answers to what the prover asks: a cache by salt and text, in whole blocks of words."""

    def __init__(self, **ways: Any) -> None:
        self.drops: tuple[str, ...] = ()
        self.serves: tuple[str, ...] = PROMPTS
        self.block = 16
        self.dropped = 0
        """Blocks at the end of a hit that it computes again, as for a drafter."""
        self.reports = True
        """``cached_tokens`` are in answers."""
        self.omits_zero = False
        """But not a hit of 0."""
        self.counts = True
        """Counters are on its metrics page."""
        self.others = 0
        """Prompt tokens of other clients that are computed beside each request."""
        self.caches = True
        self.status: dict[str, int] = {}
        self.body: bytes | None = None
        self.hangs: tuple[str, ...] = ()
        self.sees: Callable[[str, str], bool] = lambda path, salt: path not in self.drops
        self.__dict__.update(ways)
        self.balances: Callable[[], int] = lambda: 0
        """The cache behind it that gets the next request."""
        self.evicts = 0
        """Requests after which the cache is emptied once; 0: never."""
        self.asked: list[tuple[str, int]] = []
        self.queries = self.hits = 0
        self._cache: set[tuple[str, str, int]] = set()

    async def ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if path in self.hangs:
            await asyncio.sleep(3600)
        if method == "GET":
            page = f'vllm:prefix_cache_queries_total{{engine="0"}} {float(self.queries)}\n'
            page += f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}\n'
            return (200, page.encode()) if self.counts else (404, b"")
        sent = json.loads(body or b"")
        if path not in self.serves:
            return 404, b"{}"
        if path in self.status:
            return self.status[path], b"{}"
        salt = sent.pop("cache_salt")
        key = salt if self.sees(path, salt) else ""
        text = json.dumps({name: value for name, value in sent.items() if name != "model"})
        words = len(sent["token_ids"]) if path == GENERATE else len(text.split())
        self.asked.append((path, words))
        entry = (path + key, text, self.balances())
        if len(self.asked) == self.evicts:
            self._cache.clear()
        known = entry in self._cache
        hit = max(0, words - words % self.block - self.dropped * self.block) if known else 0
        if self.caches:
            self._cache.add(entry)
        self.queries += words + self.others
        self.hits += hit + self.others // 2
        usage: dict[str, Any] = {"prompt_tokens": words}
        reports = self.reports and (hit or not self.omits_zero)
        if reports and path in PROMPTS:
            usage["prompt_tokens_details"] = {"cached_tokens": hit}
        if reports and path == MESSAGES:
            usage = {"input_tokens": words, "cache_read_input_tokens": hit}
        elif path in (MESSAGES, RESPONSES):
            usage["input_tokens"] = usage.pop("prompt_tokens")
        return 200, self.body or json.dumps({"data": [{"index": 0}], "usage": usage}).encode()


async def prove(engine: FakeEngine, kind: EngineKind = "vllm", **facts: Any) -> SaltProof:
    proof = SaltProof()
    facts = {"block_tokens": None, "tokens_max": 32_768, **facts}
    await SaltProver(engine.ask, "m", kind, **facts).prove(proof)
    assert all(proof.why_not(path) or path in proof.proven for path in SALTED)
    return proof


def whys(proof: SaltProof, verdict: Verdict) -> dict[str, str]:
    return {path: one.why for path, one in proof.apis.items() if one.verdict == verdict}


async def test_an_engine_that_reads_salts_is_proven_api_by_api() -> None:
    proof = await prove(FakeEngine(serves=(*PROMPTS, *POOLED)))
    assert proof.proven == {*PROMPTS, *POOLED}
    assert proof.why_not("/v1/decisions") == "cannot be tried by this router"


@pytest.mark.parametrize("path", [*PROMPTS, *POOLED])
@pytest.mark.parametrize("reports", [True, False])
async def test_one_api_that_drops_it_is_found_and_no_other_is_blamed(path: str, *, reports: bool) -> None:
    """vLLM 0.20 and 0.26 drop it in ``/v1/messages``, 0.20 in the batch of chats."""
    engine = FakeEngine(serves=(*PROMPTS, *POOLED), drops=(path,), reports=reports)
    proof = await prove(engine)
    assert whys(proof, "refuted").keys() == {path}
    assert "drops cache_salt: a prompt with another salt took" in proof.why_not(path)
    assert proof.proven == {*PROMPTS, *POOLED} - {path}


@pytest.mark.parametrize("depth", [0, 6, 7, 500])
def test_numbers_deeper_than_any_usage_are_left_out(depth: int) -> None:
    told: Any = {"n": 1}
    for _ in range(depth):
        told = {"in": told}
    assert list(numbers(told)) == [("n", 1)] * (depth <= 6)


@pytest.mark.parametrize("hits", ["1e999", "e+", "1.0.0"])
async def test_counters_that_are_no_finite_numbers_count_nothing(hits: str) -> None:
    queries = iter((0, 64))

    async def ask(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if method == "POST":
            return 200, b'{"usage": {"prompt_tokens": 64}}'
        counted = next(queries)
        page = f"vllm:prefix_cache_queries_total {counted}\nvllm:prefix_cache_hits_total {hits}\n"
        return 200, page.encode()

    assert await EngineClient(ask).send(CHAT, b"{}") == CacheReport(prompt_tokens=64)


@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("block", [1, 16, 128, 544, 1056])
async def test_large_blocks_are_met_by_longer_prompts(block: int, dropped: int) -> None:
    engine = FakeEngine(block=block, dropped=dropped, serves=PROMPTS)
    assert (await prove(engine)).proven == set(PROMPTS)
    assert max(words for _, words in engine.asked) <= TOKENS_MAX + 8
    told = FakeEngine(block=block, dropped=dropped, serves=PROMPTS)
    assert (await prove(told, block_tokens=block)).proven == set(PROMPTS)
    assert len(told.asked) == 2 * FOREIGN * len(PROMPTS)


@pytest.mark.parametrize("block", [16, 544])
@pytest.mark.parametrize("path", ["", *PROMPTS])
@pytest.mark.parametrize(
    "ways", [{"omits_zero": True}, {"omits_zero": True, "counts": False}, {"omits_zero": True, "others": 7}]
)
async def test_a_hit_of_none_may_be_left_out(ways: dict[str, Any], path: str, block: int) -> None:
    """As by vLLM: then the other hits show that it would be reported."""
    proof = await prove(FakeEngine(block=block, drops=(path,), **ways))
    assert whys(proof, "refuted").keys() == ({path} if path else set())
    assert proof.proven == set(PROMPTS) - {path}


@pytest.mark.parametrize("drops", [(), (CHAT,)])
async def test_counters_that_others_change_prove_nothing_yet(drops: tuple[str, ...]) -> None:
    engine = FakeEngine(reports=False, others=7, drops=drops)
    proof = await prove(engine)
    assert whys(proof, "later").keys() == set(PROMPTS)
    assert "beside other requests" in proof.why_not(CHAT)
    engine.others = 0
    await SaltProver(engine.ask, "m", "vllm", block_tokens=16, tokens_max=None).prove(proof)
    assert proof.proven == set(PROMPTS) - {*drops}
    assert whys(proof, "refuted").keys() == {*drops}


async def test_no_prompt_is_longer_than_the_context() -> None:
    engine = FakeEngine(block=1056)
    proof = await prove(engine, tokens_max=512)
    assert whys(proof, "unshown") == dict.fromkeys(PROMPTS, "does not show that it caches prompts")
    assert max(words for _, words in engine.asked) <= 128 + 8


@pytest.mark.parametrize(
    ("ways", "word"),
    [
        ({"reports": False, "counts": False}, "reports no cached tokens"),
        ({"caches": False}, "does not show that it caches prompts"),
        ({"body": b"no json"}, "reports no cached tokens"),
        ({"body": b"[" * 3000}, "reports no cached tokens"),
        ({"body": b'{"usage": {"cached_tokens": "7"}}', "counts": False}, "reports no cached tokens"),
        ({"body": b'{"usage": {"prompt_tokens_details": {"cached_tokens": 64}}}'}, "drops cache_salt"),
        (
            {"status": dict.fromkeys(PROMPTS, 400)},
            "refuses the request that tries it (status 400)",
        ),
        ({"status": dict.fromkeys(PROMPTS, 403)}, "is not served (403)"),
        ({"serves": ()}, "is not served (404)"),
    ],
)
async def test_a_probe_without_a_hit_proves_nothing(ways: dict[str, Any], word: str) -> None:
    proof = await prove(FakeEngine(**ways))
    assert not proof.proven
    for path in PROMPTS:
        assert word in proof.why_not(path)
        assert not proof.may_change(path)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_engine_is_tried_again(status: int) -> None:
    engine = FakeEngine(status={MESSAGES: status})
    proof = await prove(engine)
    assert whys(proof, "later") == {MESSAGES: f"could not be tried: status {status}"}
    engine.status, before = {}, len(engine.asked)
    await SaltProver(engine.ask, "m", "vllm", block_tokens=16, tokens_max=None).prove(proof)
    assert proof.proven == set(PROMPTS)
    assert {path for path, _ in engine.asked[before:]} == {MESSAGES}, "and nothing else"


def test_an_engine_that_hangs_holds_it_up_for_a_bounded_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        proof = await prove(FakeEngine(hangs=(RESPONSES,)))
        assert loop.time() - began == pytest.approx(PROOF_S_MAX, abs=0.1)
        assert proof.proven == {CHAT, COMPLETION, MESSAGES}
        assert all("not answered in time" in proof.why_not(path) for path in (RESPONSES, BATCH, GENERATE))
        assert proof.may_change(BATCH)

    run(main())


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError(), OSError("x")])
async def test_no_error_of_the_way_is_a_proof(error: OSError) -> None:
    async def ask(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        raise error

    proof = SaltProof()
    await SaltProver(ask, "m", "vllm", block_tokens=None, tokens_max=None).prove(proof)
    assert whys(proof, "later").keys() >= set(PROMPTS)
    assert not proof.proven


async def test_sglang_is_asked_for_what_it_may_read_only() -> None:
    engine = FakeEngine(serves=(*PROMPTS, *POOLED))
    proof = await prove(engine, "sglang")
    assert proof.proven == {CHAT, COMPLETION, RESPONSES} == {path for path, _ in engine.asked}
    assert proof.why_not(MESSAGES) == "takes no cache_salt at SGLang engines"
    dropping = await prove(FakeEngine(drops=(CHAT,)), "sglang")
    assert whys(dropping, "refuted").keys() == {CHAT}


async def test_where_nothing_is_cached_nothing_is_to_be_kept_apart() -> None:
    engine = FakeEngine(caches=False)
    assert (await prove(engine, caches=False)).proven == SALTED
    assert not engine.asked


async def test_prompts_are_new_and_salts_too() -> None:
    seen: set[str] = set()
    engine = FakeEngine()
    real = engine.ask

    async def ask(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if body is not None:
            seen.add(json.loads(body)["cache_salt"])
        return await real(method, path, body)

    for _ in range(2):
        await SaltProver(ask, "m", "vllm", block_tokens=16, tokens_max=None).prove(SaltProof())
    apart = (1 + FOREIGN) * len(PROMPTS)
    assert len(seen) == 2 * (apart + len(POOLED)), "one for each API that is not served"


def by_chance(caches: int, seed: int) -> Callable[[], int]:
    chance = random.Random(seed)
    return lambda: chance.randrange(caches)


@pytest.mark.parametrize("caches", range(1, FOREIGN + 1))
@pytest.mark.parametrize("reports", [True, False])
async def test_behind_a_balancer_nothing_that_drops_salts_is_proven(caches: int, *, reports: bool) -> None:
    for seed in range(30):
        engine = FakeEngine(
            serves=(CHAT,), drops=(CHAT,), reports=reports, balances=by_chance(caches, seed), block=1
        )
        assert not (await prove(engine, tokens_max=64)).proven


@pytest.mark.parametrize("caches", [1, 2, 3, 4, 5, 8, 13, 40])
async def test_no_proof_where_caches_alternate(caches: int) -> None:
    engine = FakeEngine(serves=(CHAT,), drops=(CHAT,), balances=itertools.cycle(range(caches)).__next__)
    assert not (await prove(engine)).proven


@pytest.mark.parametrize(
    "moment",
    [
        {"reports": False, "counts": False},
        {"status": dict.fromkeys(PROMPTS, 400)},
        {"status": dict.fromkeys(PROMPTS, 403)},
        {"serves": ()},
        {"caches": False},
        {"body": b"no json"},
    ],
)
async def test_one_bad_moment_is_not_for_ever(moment: dict[str, Any]) -> None:
    usual = FakeEngine().__dict__
    engine = FakeEngine(**moment)
    proof = await prove(engine)
    assert proof.again
    assert not proof.proven
    for name in moment:
        setattr(engine, name, usual[name])
    await SaltProver(engine.ask, "m", "vllm", block_tokens=16, tokens_max=None).prove(proof)
    assert proof.proven == set(PROMPTS)
    assert not proof.doubts


async def test_an_evicted_repetition_is_tried_again() -> None:
    engine = FakeEngine(serves=(CHAT,), evicts=2)
    assert (await prove(engine)).proven == {CHAT}, "with a longer prompt immediately"
    engine = FakeEngine(serves=(CHAT,), evicts=2)
    proof = await prove(engine, tokens_max=32)
    assert whys(proof, "unshown").keys() == {CHAT}
    await SaltProver(engine.ask, "m", "vllm", block_tokens=1, tokens_max=None).prove(proof)
    assert proof.proven == {CHAT}


async def test_a_foreign_hit_is_final() -> None:
    engine = FakeEngine(serves=(CHAT,), drops=(CHAT,))
    proof = await prove(engine, tokens_max=512)
    engine.drops, before = (), len(engine.asked)
    await SaltProver(engine.ask, "m", "vllm", block_tokens=16, tokens_max=None).prove(proof)
    assert whys(proof, "refuted").keys() == {CHAT}
    assert len(engine.asked) == before


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [SaltProof(tries=tries).pause_s for tries in (*range(1, 8), 10_000)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1]) == (AGAIN_S, 2 * AGAIN_S, AGAIN_S_MAX)
