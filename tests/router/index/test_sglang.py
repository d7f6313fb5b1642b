"""An SGLang engine's events, as they stand on the wire: its page hashes are computed, or learned where they
cover more than events tell.

Facts: srt/disaggregation/kv_events.py and srt/mem_cache/events.py of SGLang 0.5.23.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import NO_EXTRAS, HashChain, HashScheme, PromptExtras, block_hashes
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import UNKNOWN_TYPES_MAX, DecodedBatch
from kvatlas.publisher.events import BlockStored as Stored
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineQuery
from tests.support.event_writer import Prompt, Writer, tokens
from tests.support.sglang_wire import AllBlocksCleared, BlockRemoved, BlockStored

PAGE = 16


def page_hashes(
    prompt: Sequence[int], salt: str | None = None, namespace: bytes = b"", *, eagle: bool = False
) -> list[int]:
    """One per whole page: SHA-256 over the digest before and the tokens, its first 8 bytes signed."""
    digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else b""
    found = []
    units = list(pairwise(prompt)) if eagle else [(token,) for token in prompt]
    for start in range(0, len(units) - len(units) % PAGE, PAGE):
        page = [token for unit in units[start : start + PAGE] for token in unit]
        words = b"".join(token.to_bytes(4, "little") for token in page)
        digest = hashlib.sha256(digest + words).digest()
        named = hashlib.sha256(namespace + digest[:8]).digest() if namespace else digest
        found.append(int.from_bytes(named[:8], "big", signed=True))
    return found


def stored(
    prompt: Sequence[int],
    *,
    namespace: bytes = b"",
    medium: str = "GPU",
    eagle: bool = False,
    **fields: Any,
) -> list[BlockStored]:
    """One event per page, each naming the page before as its parent."""
    hashes = page_hashes(prompt, fields.get("cache_salt"), namespace, eagle=eagle)
    parents = [None, *hashes[:-1]]
    units: list[Any] = list(pairwise(prompt)) if eagle else list(prompt)
    return [
        BlockStored([block], parent, units[n * PAGE : (n + 1) * PAGE], PAGE, None, medium, **fields)
        for n, (block, parent) in enumerate(zip(hashes, parents, strict=True))
    ]


def batch(*events: Any) -> DecodedBatch:
    return decode_batch(msgspec.msgpack.encode([1.0, list(events), 0]))


def tell(fleet: FleetResidency, *events: Any) -> None:
    fleet.apply("a", batch(*events))
    fleet.engine("a").finish_detection()


def hit(fleet: FleetResidency, prompt: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> int:
    return fleet.predict(Prompt(prompt, extras), ["a"])["a"].hit_tokens


SGLANG = SetupEvidence(kind="sglang")
ADAPTERS = SetupEvidence(
    kind="sglang",
    statements=(EngineStatement(source="server_info", kind="sglang", namespaced=True),),
)


def fleet_of(setup: SetupEvidence | None) -> FleetResidency:
    """An engine of this set-up; None: its software is not known."""
    fleet = FleetResidency(ModelFacts())
    if setup is not None:
        fleet.engine("a").learn_setup(setup)
    return fleet


def test_the_hashes_are_those_of_sglang() -> None:
    prompt = tokens(3 * PAGE, seed=1)
    for salt in (None, "tenant"):
        scheme = HashScheme(algo="sglang", seed="", hash_block_size=PAGE, tagged=False)
        signed = [
            block - (block >> 63 << 64)
            for block in block_hashes(prompt, scheme, PromptExtras(cache_salt=salt))
        ]
        assert signed == page_hashes(prompt, salt)


@given(
    st.lists(st.integers(0, (1 << 31) - 1), max_size=200),
    st.integers(0, 200),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 1),
)
def test_a_chain_grows_as_if_hashed_in_one_piece(
    prompt: list[int], first: int, page: int, lookahead: int
) -> None:
    scheme = HashScheme("sglang", "", page, lookahead, tagged=False)
    chain = HashChain(scheme)
    chain.extend(prompt[:first])
    assert chain.extend(prompt) == block_hashes(prompt, scheme)


@pytest.mark.parametrize(
    ("setup", "mode"),
    [(None, Detection.NATIVE), (SGLANG, Detection.NATIVE), (ADAPTERS, Detection.LEARNED)],
    ids=["unknown", "sglang", "adapters"],
)
def test_prompts_are_predicted_and_nothing_is_rejected(setup: SetupEvidence | None, mode: Detection) -> None:
    fleet, prompts = fleet_of(setup), [tokens(200, seed=n) for n in range(20)]
    for prompt in prompts:
        tell(fleet, *stored(prompt))
    assert fleet.engine("a").detection is mode
    assert not fleet.engine("a").rejected
    assert [hit(fleet, prompt) for prompt in prompts] == [192] * 20
    assert hit(fleet, prompts[0][:100] + tokens(100, seed=99)) == 96
    assert hit(fleet, prompts[0][:96]) == 80, "the last token is always computed"
    tell(fleet, BlockRemoved(page_hashes(prompts[0])[3:], "GPU"))
    assert hit(fleet, prompts[0]) == 48


@pytest.mark.parametrize(
    ("setup", "mode"),
    [(None, Detection.NATIVE), (SGLANG, Detection.NATIVE), (ADAPTERS, Detection.LEARNED)],
    ids=["unknown", "sglang", "adapters"],
)
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_pages_of_token_pairs_are_predicted(
    setup: SetupEvidence | None, mode: Detection, salt: str | None
) -> None:
    """With EAGLE a page is found if the token behind it is the same too, and is not the prompt's last."""
    fleet, prompt, extras = fleet_of(setup), tokens(200), PromptExtras(cache_salt=salt)
    told = stored(prompt, eagle=True, **({} if salt is None else {"cache_salt": salt}))
    tell(fleet, *told)
    assert fleet.engine("a").detection is mode
    assert not fleet.engine("a").rejected
    other = tokens(100, seed=99)
    hits = {length: hit(fleet, prompt[:length] + other, extras) for length in (95, 96, 97, 98, 200)}
    assert hits == {95: 80, 96: 80, 97: 96, 98: 96, 200: 192}
    lengths = {length: hit(fleet, prompt[:length], extras) for length in (0, 1, 17, 18, 97, 98, 194, 200)}
    assert lengths == {0: 0, 1: 0, 17: 0, 18: 16, 97: 80, 98: 96, 194: 192, 200: 192}
    assert hit(fleet, prompt, PromptExtras(cache_salt="x")) == 0
    tell(fleet, BlockRemoved(page_hashes(prompt, salt, eagle=True)[3:], "GPU"))
    assert hit(fleet, prompt, extras) == 48


def test_malformed_pairs_are_rejected_and_the_others_are_used() -> None:
    good: list[Any] = stored(tokens(100), eagle=True)
    wrong: list[list[Any]] = [[(1, 2), 3], [(1, "x")], [(1, 2), (1, 2, 3)]]
    bad: list[Any] = [BlockStored([1], None, pairs, 2, None, "GPU") for pairs in wrong]
    for events in ([*bad, *good], [*good, *bad], [{"type": "BlockMoved"}, *bad, *good]):
        found = batch(*events)
        assert len(found.rejected) == len(bad)
        kept = [event for event in found.events if isinstance(event, Stored)]
        assert [event.lookahead_token_ids for event in kept] == [[[page.token_ids[-1][1]]] for page in good]
        assert [event.tokens() for event in kept] == [[pair[0] for pair in page.token_ids] for page in good]


def test_hashes_of_another_form_are_learned_immediately() -> None:
    """No seed of vLLM's schemes is searched for an engine known to be SGLang."""
    fleet, prompt = fleet_of(SGLANG), tokens(200)
    fleet.apply("a", batch(*stored(prompt, namespace=b"n")))
    assert fleet.engine("a").detection is Detection.LEARNED
    assert hit(fleet, prompt) == 192


def test_a_running_search_ends_when_the_engine_is_known_to_be_sglang() -> None:
    fleet, prompt = fleet_of(None), tokens(200)
    fleet.apply("a", batch(*stored(prompt, namespace=b"n")))
    assert fleet.engine("a").searching
    fleet.engine("a").learn_setup(SGLANG)
    assert not fleet.engine("a").searching
    assert fleet.engine("a").detection is Detection.LEARNED
    assert hit(fleet, prompt) == 192


def test_pages_without_their_beginning_are_predicted() -> None:
    """A router that starts late sees no event of the first page; each page's hash covers all before it."""
    fleet, prompt = fleet_of(SGLANG), tokens(200)
    tell(fleet, *stored(prompt)[1:])
    tell(fleet, *stored(prompt)[:1])
    assert hit(fleet, prompt) == 192


def test_a_mixed_fleet_assumes_no_scheme_of_the_other_software() -> None:
    fleet, prompt = FleetResidency(ModelFacts()), tokens(200)
    fleet.engine("a").learn_setup(SGLANG)
    tell(fleet, *stored(prompt))
    writer = Writer(HashScheme())
    fleet.apply("v", DecodedBatch(1.0, [writer.stored(prompt)], 0, None, []))
    assert fleet.engine("v").detection is Detection.NATIVE
    fleet.forget("a")
    fleet.forget("v")
    tell(fleet, *stored(prompt)[6:])
    query = fleet.find_query(fleet.engine("a"))
    assert isinstance(query, EngineQuery)
    assert (query.scheme.algo, query.mode) == ("sglang", "assumed")
    assert fleet.predict(Prompt(prompt), ["a"])["a"].mode == "native", "its pages are in the prompt"
    tell(fleet, *stored(prompt)[:6])
    assert hit(fleet, prompt) == 192


def test_the_host_cache_counts_and_goes_with_a_clear() -> None:
    fleet, prompt = FleetResidency(ModelFacts()), tokens(200)
    tell(fleet, *stored(prompt), *stored(prompt, medium="CPU_PINNED"))
    tell(fleet, BlockRemoved(page_hashes(prompt), "GPU"))
    found = fleet.predict(Prompt(prompt), ["a"])["a"]
    assert (found.hit_tokens, found.cpu_tokens) == (0, 192)
    tell(fleet, AllBlocksCleared())
    assert fleet.predict(Prompt(prompt), ["a"])["a"].offloaded_tokens == 0


def test_a_page_that_host_memory_publishes_again_goes_with_one_removal() -> None:
    """A copy of its windows or states publishes it again."""
    fleet, prompt = FleetResidency(ModelFacts()), tokens(200)
    told = stored(prompt, medium="CPU_PINNED")
    tell(fleet, *stored(prompt), *told, *told, BlockRemoved(page_hashes(prompt), "GPU"))
    assert fleet.predict(Prompt(prompt), ["a"])["a"].cpu_tokens == 192
    tell(fleet, BlockRemoved(page_hashes(prompt)[4:], "CPU_PINNED"))
    assert fleet.predict(Prompt(prompt), ["a"])["a"].cpu_tokens == 64


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        ({"cache_salt": "tenant"}, PromptExtras(cache_salt="tenant")),
        ({"lora_name": "sql"}, PromptExtras("sql", "/adapters/sql")),
        ({"lora_name": "sql", "cache_salt": "tenant"}, PromptExtras("sql", "/adapters/sql", "tenant")),
    ],
    ids=["salt", "lora", "both"],
)
def test_salts_and_adapters_keep_prompts_apart(fields: dict[str, str], extras: PromptExtras) -> None:
    fleet, prompt = fleet_of(ADAPTERS), tokens(200)
    tell(fleet, *stored(tokens(50, seed=1)), *stored(prompt, namespace=b"n", **fields))
    assert hit(fleet, prompt, extras) == 192
    assert hit(fleet, prompt) == 0
    assert hit(fleet, prompt, PromptExtras(cache_salt="other")) == 0


def test_a_salt_is_computed() -> None:
    fleet, prompt = fleet_of(SGLANG), tokens(200)
    tell(fleet, *stored(prompt, cache_salt="tenant"))
    assert fleet.engine("a").detection is Detection.NATIVE
    assert hit(fleet, prompt, PromptExtras(cache_salt="tenant")) == 192
    assert hit(fleet, prompt) == hit(fleet, prompt, PromptExtras(cache_salt="other")) == 0
    assert hit(fleet, prompt, PromptExtras("sql", "/adapters/sql", "tenant")) == 0


def test_an_engine_none_of_whose_events_can_be_used() -> None:
    fleet = FleetResidency(ModelFacts())
    engine = fleet.engine("a")
    assert engine.unusable_events == 0
    tell(fleet, {"type": "BlockStored", "block_hashes": [1]}, {"type": "BlockMoved"})
    assert engine.unusable_events == 2
    tell(fleet, *stored(tokens(20), medium="TAPE"))
    assert engine.unusable_events == 3
    tell(fleet, *stored(tokens(20)), {"type": "BlockMoved"})
    assert engine.unusable_events == 0
    assert engine.unknown_types == {"BlockMoved": 2}


def test_an_engine_whose_events_cannot_be_used_any_more() -> None:
    fleet = FleetResidency(ModelFacts())
    engine = fleet.engine("a")
    tell(fleet, *stored(tokens(20)))
    for _ in range(100):
        tell(fleet, {"type": "BlockInactive", "block_hashes": [1]})
    assert engine.unusable_events == 0, "one beside the events that are used is no problem"
    for _ in range(63):
        tell(fleet, {"type": "BlockStored", "block_hashes": [1]})
    assert engine.unusable_events == 0
    tell(fleet, {"type": "BlockStored", "block_hashes": [1]})
    assert engine.unusable_events == 64
    fleet.forget("a")
    assert engine.unusable_events == 0, "of another process nothing is known yet"


def test_unknown_types_are_few() -> None:
    fleet = FleetResidency(ModelFacts())
    tell(fleet, *({"type": f"New{number}"} for number in range(40)))
    types = fleet.engine("a").unknown_types
    assert (len(types), types.total(), types["other"]) == (UNKNOWN_TYPES_MAX + 1, 40, 24)
