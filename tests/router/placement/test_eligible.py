"""Look-up parameters of the eligible engines are kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.salt_proof import SaltProof
from kvatlas.router.fleet.status import Fleet, ModelCard
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.openai.apis import CHAT, RESPONSES
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.openai.response_ids import ResponseIds, of_engine
from kvatlas.router.placement.candidate_sets import CandidateSets, candidate_set
from kvatlas.router.placement.eligible import EligibleEngines
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.shadow import ShadowSpec
from tests.support.event_writer import Writer, batch
from tests.support.examples import examples

EVENTS = (*["tcp://e:1"] * 3, None)
ADDRESSES = [
    EngineAddress(f"http://{name}:1", events=events) for name, events in zip("abcd", EVENTS, strict=True)
]
SCHEMES = [HashScheme(hash_block_size=size) for size in (16, 32)]
MODELS = [ModelCard("m"), ModelCard("n")]

engine = st.integers(0, 3)
change = st.one_of(
    st.tuples(st.just("up"), engine, st.sampled_from(MODELS)),
    st.tuples(st.just("down"), engine),
    st.tuples(st.just("stores"), engine, st.sampled_from(SCHEMES)),
    st.tuples(st.just("restarts"), engine),
    st.tuples(st.just("snapshot"), engine, st.sampled_from(SCHEMES)),
    st.tuples(st.just("told"), engine, st.sampled_from(SCHEMES)),
    st.tuples(st.just("shadowed"), engine, st.booleans()),
    st.tuples(st.just("leaves"), engine),
    st.tuples(st.just("comes"), engine),
    st.tuples(st.just("reloads")),
)


class Elsewhere:
    """Statements of other replicas, of schemes only."""

    def __init__(self) -> None:
        self.schemes: dict[str, HashScheme] = {}

    def scheme(self, engine_id: str) -> HashScheme | None:
        return self.schemes.get(engine_id)

    def layout(self, engine_id: str) -> None:
        return None


class World:
    """A fleet of up to four engines, the last one without events."""

    def __init__(self, elsewhere: Elsewhere | None) -> None:
        self.accounts, self.elsewhere, self.known = Accounts(lambda: 0.0), elsewhere, set(range(4))
        self.scopes = ModelIndexes(lambda model: ModelFacts())
        self.fleet: Fleet[Engine] = Fleet(ADDRESSES, self._make)
        self.parties = CandidateSets(self.fleet, self.scopes)

    def _make(self, address: EngineAddress, *, fleet_changed: Callable[[], None]) -> Engine:
        other: Any = self.elsewhere
        leaving = (lambda one: self.scopes.remove(one.engine_id),)
        return Engine(address, self.accounts, fleet_changed=fleet_changed, elsewhere=other, leaving=leaving)

    def change(self, name: str, number: int = 0, what: Any = None) -> None:
        address = ADDRESSES[number]
        one = self.fleet.get(address.engine_id)
        if name in {"leaves", "comes"}:
            (self.known.discard if name == "leaves" else self.known.add)(number)
            self.fleet.assign(DesiredFleet(tuple(ADDRESSES[at] for at in sorted(self.known))))
        elif name == "reloads":
            for each in self.fleet:
                each.learn_from(None, shadow=None)
            for card in MODELS:
                self.scopes.relearn(card.id)
        elif name == "told" and self.elsewhere is not None:
            self.elsewhere.schemes[address.engine_id] = what
        elif one is not None:
            self._of_engine(one, name, what)

    def _of_engine(self, one: Engine, name: str, what: Any) -> None:
        if name == "up":
            one.up, one.models = True, (what,)
            shadow = None if one.publishes_events else ShadowSpec()
            one.learn_from(self.scopes.assign(one.engine_id, what.id), shadow=shadow)
        elif name == "down":
            one.up = False
        elif name == "shadowed":
            one.learn_from(one.residency, shadow=ShadowSpec() if what else None)
        elif one.residency is not None and one.publishes_events:
            if name == "restarts":
                one.residency.forget()
            if name == "stores":
                one.residency.apply(stored(what))
            if name == "snapshot":
                one.residency.stage(stored(what))
                one.residency.adopt()


def stored(scheme: HashScheme) -> DecodedBatch:
    return batch(Writer(scheme).stored(list(range(96))))


@settings(max_examples=examples(800))
@given(st.lists(st.tuples(change, st.booleans()), max_size=25), st.booleans())
def test_the_kept_set_equals_a_new_search(changes: list[tuple[Any, bool]], replicas: bool) -> None:
    world = World(Elsewhere() if replicas else None)
    for (name, *what), ready in changes:
        world.change(name, *what)
        engines = world.fleet.ready(None) if ready else list(world.fleet)
        model = engines[0].base_model if engines else None
        # Of most engines of a model it is that of all of them.
        whole = engines if model is None else world.fleet.serving(model)
        assert world.parties.get(engines) in (candidate_set(engines), candidate_set(whole))


def test_facts_of_the_same_engines_are_reused() -> None:
    world = World(None)
    for number in range(4):
        world.change("up", number, MODELS[0])
        world.change("stores", number, SCHEMES[0])
    ready = world.fleet.ready("m")
    first = world.parties.get(ready)
    assert [*first.by_model.values()] == [[one.engine_id for one in ready if one.publishes_events]]
    assert first.guessed
    assert world.parties.get(ready) is first
    world.change("restarts", 1)
    assert world.parties.get(ready) is not first


def isolating(*proven: str | None) -> tuple[Fleet[Engine], EligibleEngines, list[Engine]]:
    """Engines of these models; None: of ``m`` but not proven to read salts."""
    world = World(None)
    world.fleet.needs_salt_proofs = True
    engines = list(world.fleet)[: len(proven)]
    for engine, model in zip(engines, proven, strict=True):
        engine.up, engine.models = True, (ModelCard(model or "m"),)
        proven_apis = dict.fromkeys((CHAT, RESPONSES), Shown("proven"))
        engine.salt_proof = SaltProof(proven_apis if model else {CHAT: Shown("refuted", "drops it")})
    return world.fleet, EligibleEngines(world.fleet, world.accounts), engines


def salted(path: str = CHAT, **fields: Any) -> InboundRequest:
    return InboundRequest("POST", path, b"", [], b"{}", "m", isolated=True, **fields)


def test_where_all_engines_are_proven_their_list_stays_the_same_object() -> None:
    fleet, eligible, _ = isolating("m", "m")
    assert eligible.engines(salted(), frozenset()) is fleet.ready("m")


def test_engines_of_other_models_are_not_waited_for() -> None:
    _, eligible, engines = isolating(None, "n")
    engines[1].salt_proof = None
    with pytest.raises(ApiError) as refused:
        eligible.engines(salted(), frozenset())
    assert refused.value.code == "cache_salt_not_accepted"
    engines[0].salt_proof = None
    with pytest.raises(ApiError) as refused:
        eligible.engines(salted(), frozenset())
    assert refused.value.status == 503


def test_a_stream_goes_on_at_engines_that_say_ids_and_one_for_a_parser_where_these_are_read() -> None:
    _, eligible, engines = isolating("m", "m", "m")
    for engine, version in zip(engines, ("0.32.0", "0.32.0", "0.10.1"), strict=True):
        engine.version = version
    engines[0].parses = False
    assert eligible.engines(salted(continues=True), frozenset()) == engines[:2]
    assert eligible.engines(salted(continues=True, parses=True), frozenset()) == [engines[1]]


def test_a_response_is_not_gone_on_from_where_salts_are_dropped() -> None:
    _, eligible, engines = isolating("m", None)
    earlier = [of_engine(ResponseIds().make(""), engine.engine_id) for engine in engines]
    assert eligible.engines(salted(RESPONSES, earlier_response=earlier[0]), frozenset()) == [engines[0]]
    with pytest.raises(ApiError):
        eligible.engines(salted(RESPONSES, earlier_response=earlier[1]), frozenset())
