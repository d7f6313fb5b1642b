"""An engine whose context is too short for a prompt and its smallest answer does not get it."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.status import Fleet, ModelCard
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.openai.response_ids import ResponseIds, of_engine
from kvatlas.router.placement.eligible import NO_LENGTH, EligibleEngines, Length, length_of
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.prompts.conversation import Turn
from kvatlas.router.prompts.prompt import Prompt, TextAffinity
from kvatlas.router.prompts.request import NO_REST, Rest
from kvatlas.router.prompts.settings import PromptStats

CHAT = "/v1/chat/completions"
NOT_EXCLUDED: frozenset[str] = frozenset()


def of(at: int) -> str:
    return f"http://e{at}:1"


def fleet_of(*lengths: int | None, adapter: str = "") -> tuple[Fleet[Engine], EligibleEngines]:
    """An engine of model ``m`` for each length; the last ``None`` does not say."""
    accounts = Accounts(lambda: 0.0)

    def make(address: EngineAddress, *, fleet_changed: Any) -> Engine:
        return Engine(address, accounts, fleet_changed=fleet_changed)

    fleet: Fleet[Engine] = Fleet([EngineAddress(of(at)) for at in range(len(lengths))], make)
    for at, length in enumerate(lengths):
        serves(fleet, at, length, adapter)
    return fleet, EligibleEngines(fleet, accounts)


def serves(fleet: Fleet[Engine], at: int, length: int | None, adapter: str = "") -> None:
    engine = fleet.get(of(at))
    assert engine is not None
    cards = [ModelCard("m", max_model_len=length)]
    if adapter:
        cards.append(ModelCard(adapter, parent="m"))
    engine.models, engine.up = tuple(cards), True


def request(model: str | None = "m", **fields: Any) -> InboundRequest:
    return InboundRequest("POST", CHAT, b"", [], b"x" * 400, model, **fields)


def places(eligible: EligibleEngines, asked: int, least: int, **fields: Any) -> list[int]:
    exclude = fields.pop("exclude", NOT_EXCLUDED)
    found = eligible.engines(request(**fields), exclude, Length(asked, least))
    return [int(engine.engine_id[8:-2]) for engine in found]


@pytest.mark.parametrize("model", ["m", "adapter", None])
@pytest.mark.parametrize("count", [1, 500])
def test_only_engines_with_room_for_prompt_and_answer_get_it(model: str | None, count: int) -> None:
    _, eligible = fleet_of(*[1000, 4000] * count, adapter="adapter")
    long = [at for at in range(2 * count) if at % 2]
    assert places(eligible, 1000, 900, model=model) == list(range(2 * count))
    assert places(eligible, 1001, 1001, model=model) == long
    assert places(eligible, 4000, 4000, model=model) == long
    # Room for the answer that is asked for comes before room for any.
    assert places(eligible, 1500, 900, model=model) == long


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
@pytest.mark.parametrize(
    ("given", "length"),
    [
        ([7] * 1500, (1500, 1500)),
        ([[7] * 10, [7] * 1500, [7]], (1500, 1500)),
        (["x" * 8000, "x"], (2000, 0)),
        ("x" * 8000, (2000, 0)),
        ([[7, 8], "x" * 8000], (2000, 2)),
        ([], (0, 0)),
        (None, (0, 0)),
        (12, (0, 0)),
    ],
)
def test_inputs_of_pooling_apis_have_a_length_too(path: str, given: Any, length: tuple[int, int]) -> None:
    body = json.dumps({"model": "m", "input": given}).encode()
    found = length_of(InboundRequest("POST", path, b"", [], body, "m"), None)
    assert (found.asked // 100, found.least) == (length[0] // 100, length[1])
    # Cut by the engine, or of an API that does not pool.
    cut = json.dumps({"model": "m", "input": given, "truncate_prompt_tokens": 5}).encode()
    assert length_of(InboundRequest("POST", path, b"", [], cut, "m"), None) == NO_LENGTH
    assert length_of(InboundRequest("POST", "/v1/audio/speech", b"", [], body, "m"), None) == NO_LENGTH


def test_where_all_are_long_enough_the_list_of_engines_stays_the_same_object() -> None:
    fleet, eligible = fleet_of(*[4000] * 1000)
    for length in (NO_LENGTH, Length(100, 0), Length(4000, 3000)):
        assert eligible.engines(request(), NOT_EXCLUDED, length) is fleet.ready("m")


def test_one_that_does_not_say_is_not_left_out() -> None:
    _, eligible = fleet_of(1000, None, -5, 0)
    assert places(eligible, 2000, 2000) == [1, 2, 3]


def test_where_no_answer_of_that_length_fits_a_shorter_one_will_do() -> None:
    _, eligible = fleet_of(1000, 2000)
    assert places(eligible, 100_000, 900) == [0, 1]
    assert places(eligible, 100_000, 1500) == [1]


def test_a_prompt_that_fits_nowhere_goes_to_the_longest_engine() -> None:
    _, eligible = fleet_of(1000, 4000, 4000, 2000)
    assert places(eligible, 5000, 5000) == [1, 2]


@pytest.mark.parametrize("why", ["down", "held", "asleep", "tried", "gone"])
def test_while_the_long_ones_cannot_take_it_the_short_ones_do_not_refuse_it_for_ever(why: str) -> None:
    fleet, eligible = fleet_of(1000, 4000)
    exclude, long = NOT_EXCLUDED, fleet.get(of(1))
    assert long is not None
    if why == "down":
        long.up = False
    elif why == "held":
        long.held = "drained"
    elif why == "asleep":
        long.asleep = True
    elif why == "tried":
        exclude = frozenset((of(1),))
    else:
        fleet.assign(DesiredFleet((EngineAddress(of(0)),)))
        assert places(eligible, 2000, 2000) == [0], "no engine of the model can take it: its refusal counts"
        return
    with pytest.raises(ApiError) as raised:
        places(eligible, 2000, 2000, exclude=exclude)
    assert (raised.value.status, raised.value.code) == (503, "no_ready_engine")
    assert "2000 tokens" in raised.value.message
    # An estimate keeps no engine out.
    assert places(eligible, 2000, 0, exclude=exclude) == [0]


def test_an_open_breaker_is_asked_only_among_those_that_are_long_enough() -> None:
    fleet, eligible = fleet_of(1000, 4000)
    long = fleet.get(of(1))
    assert long is not None
    for _ in range(50):
        long.breaker.record(False, 0.0)
    assert not long.breaker.allows(0.0)
    assert places(eligible, 100, 100) == [0]
    assert places(eligible, 2000, 2000) == [1]


def test_a_gateways_engines_are_compared_with_each_other_only() -> None:
    _, eligible = fleet_of(1000, 4000, 2000)
    assert places(eligible, 1500, 1500, among=frozenset(("e0:1", "e2:1"))) == [2]
    assert places(eligible, 3000, 3000, among=frozenset(("e0:1", "e2:1"))) == [2], "none allowed fits"


def test_where_only_one_engine_can_take_it_that_one_refuses_it() -> None:
    fleet, eligible = fleet_of(1000, 4000)
    assert places(eligible, 2000, 2000, pinned=of(0)) == [0]
    assert places(eligible, 2000, 2000, earlier_response=of_engine(ResponseIds().make(""), of(0))) == [0]
    assert len(fleet) == 2


def test_an_engine_that_changes_its_length_counts_as_it_is() -> None:
    fleet, eligible = fleet_of(1000, 4000)
    assert places(eligible, 2000, 2000) == [1]
    serves(fleet, 0, 8000)
    assert places(eligible, 2000, 2000) == [0, 1]
    serves(fleet, 1, 1500)
    assert places(eligible, 2000, 2000) == [0]


def prompt(tokens: int, **fields: Any) -> Prompt:
    turn = Turn(array("I", range(tokens)), NO_EXTRAS)
    return Prompt(turn, PromptStats(), source="local", **fields)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (None, NO_LENGTH),
        (prompt(100), (101, 101)),
        (prompt(100, answer_tokens_max=50), (150, 101)),
        (prompt(100, answer_tokens_max=50, answer_tokens_min=20), (150, 120)),
        (prompt(100, answer_tokens_min=20), (120, 120)),
        (prompt(100, rest=Rest(2, 900, 700, given=True)), (701, 701)),
        (prompt(100, rest=Rest(2, 900, 700, given=False)), (701, 101)),
        (prompt(100, rest=Rest(2, 90, 60, given=True)), (101, 101)),
        (prompt(9, variants={"python": prompt(9), "sglang": prompt(12)}), (13, 13)),
        (TextAffinity((1,), "no_tokenizer"), (101, 0)),
        (TextAffinity((1,), "truncation"), NO_LENGTH),
        (TextAffinity((1,), "no_tokenizer", 3), NO_LENGTH),
    ],
)
def test_the_length_of_a_request(read: Prompt | TextAffinity | None, expected: tuple[int, int]) -> None:
    found = length_of(request(), read)
    assert found == expected
    if read is not None and found.asked:
        assert not read.is_surely_shorter(found.asked - 1)
    if isinstance(read, Prompt) and read.rest is NO_REST and not read.variants:
        assert read.is_surely_shorter(read.num_tokens + read.answer_tokens_max + read.answer_tokens_min)


def test_prompts_behind_the_first_are_estimated_in_its_tokens() -> None:
    texts = Rest(3, 4000, 2000, given=False)
    assert texts.in_tokens(100, 400) == Rest(3, 1000, 500, given=False)
    assert texts.in_tokens(10, 4000) == Rest(3, 1000, 500, given=False), "never fewer than one of four"
    assert texts.in_tokens(500, 500) == Rest(3, 4000, 2000, given=False)
    assert texts.in_tokens(2, 1) == Rest(3, 1000, 500, given=False), "a short text says little"
    given = Rest(3, 4000, 2000, given=True)
    assert given.in_tokens(1, 1) is given
    assert given.cut(None) is given
    assert given.cut(100) == Rest(3, 300, 100, given=True)
    assert given.cut(-1) == Rest(3, 4000, 0, given=True)
