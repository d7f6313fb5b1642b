"""Detection of hash schemes from events alone, and what is never taken for proof."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import DEFAULT_SEED, NO_EXTRAS, HashScheme, MultimodalItem, PromptExtras
from kvatlas.publisher.events import BlockStored, encode_tokens
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn import hash_scheme as detect
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.learn.root_events import event_extras
from kvatlas.router.index.model import FleetResidency
from tests.support.event_writer import WINDOW, Prompt, Writer, batch, random_chain, tokens

DEFAULT = HashScheme()
SECRET = HashScheme(seed="secret")


@pytest.fixture(autouse=True)
def _few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "SEEDS_MAX", 100)


SEEDS_MAX = detect.SEEDS_MAX


@pytest.fixture
def all_seeds(_few_seeds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "SEEDS_MAX", SEEDS_MAX)


def fleet_of(**facts: Any) -> FleetResidency:
    return FleetResidency(ModelFacts(**facts))


def feed(fleet: FleetResidency, *events: BlockStored, engine_id: str = "a") -> EngineResidency:
    fleet.apply(engine_id, batch(*events))
    engine = fleet.engine(engine_id)
    engine.finish_detection()
    return engine


def predicted(fleet: FleetResidency, prompt: list[int], extras: PromptExtras = NO_EXTRAS) -> int:
    return fleet.predict(Prompt(prompt, extras), ["a"])["a"].hit_tokens


SCHEMES = [
    DEFAULT,
    HashScheme(algo="sha256_cbor"),
    HashScheme(seed="0"),
    HashScheme(seed="99"),
    HashScheme(algo="sha256_cbor", seed="42"),
    HashScheme(algo="xxhash", seed="42"),
    HashScheme(algo="xxhash_cbor", seed="7"),
    HashScheme(hash_block_size=32),
    HashScheme(hash_block_size=1),
    HashScheme(hash_block_size=528),
    HashScheme(lookahead=1),
    HashScheme(lookahead=3, algo="sha256_cbor"),
]


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(
    "scheme", SCHEMES, ids=lambda s: f"{s.algo}-{s.seed}-{s.hash_block_size}-{s.lookahead}"
)
def test_a_plain_root_event_settles_the_scheme(scheme: HashScheme, as_bytes: bool) -> None:
    prompt = tokens(3 * scheme.hash_block_size + 1 + scheme.lookahead)
    fleet = fleet_of()
    engine = feed(fleet, Writer(scheme, as_bytes=as_bytes).stored(prompt))
    assert engine.detection is Detection.NATIVE
    assert engine.scheme == scheme
    assert predicted(fleet, prompt) == 3 * scheme.hash_block_size


@pytest.mark.parametrize(("size", "unit"), [(64, 16), (64, 32), (32, 16), (96, 16), (96, 48)])
def test_the_hash_block_may_be_a_part_of_the_block(size: int, unit: int) -> None:
    fleet = fleet_of()
    engine = feed(fleet, Writer(HashScheme(hash_block_size=unit), size=size).stored(tokens(300)))
    assert engine.scheme == HashScheme(hash_block_size=unit)
    assert engine.layout is not None
    assert engine.layout.hash_block_size == unit
    assert predicted(fleet, tokens(300)) == 300 // size * size


def test_a_numeric_seed_with_a_small_hash_block_is_found_by_the_common_divisor() -> None:
    scheme = HashScheme(seed="7", hash_block_size=16)
    window = Writer(scheme, group=1, kind=WINDOW, window=64)
    fleet = fleet_of()
    prompt = tokens(200)
    engine = feed(fleet, window.stored(prompt, keep=[]), Writer(scheme, size=64).stored(prompt))
    assert engine.scheme == scheme


def test_configured_seeds_are_tried() -> None:
    scheme = HashScheme(seed="a long secret", algo="sha256_cbor")
    engine = feed(fleet_of(hash_seeds=("other", "a long secret")), Writer(scheme).stored(tokens(100)))
    assert engine.scheme == scheme


@pytest.mark.usefixtures("all_seeds")
def test_the_scheme_of_one_engine_is_tried_on_the_next() -> None:
    fleet = fleet_of()
    scheme = HashScheme(seed="1022")
    feed(fleet, Writer(scheme).stored(tokens(100)))
    fleet.apply("b", batch(Writer(scheme).stored(tokens(100))))
    assert fleet.engine("b").scheme == scheme, "without any search"
    assert fleet.engine("b").detection is Detection.NATIVE


@pytest.mark.usefixtures("all_seeds")
def test_a_search_runs_in_slices_and_prefixes_are_learned_beside_it() -> None:
    fleet = fleet_of()
    engine, scheme = fleet.engine("a"), HashScheme(seed="1023")
    engine.apply(batch(Writer(scheme).stored(tokens(100))))
    assert fleet.searching() == [engine]
    slices = 1
    while fleet.searching():
        answer = fleet.predict(Prompt(tokens(100)), ["a"])["a"]
        assert (answer.mode, answer.hit_tokens) == ("learned", 96)
        engine.advance_detection()
        slices += 1
    assert (engine.detection, engine.scheme) == (Detection.NATIVE, scheme)
    assert slices > 10
    answer = fleet.predict(Prompt(tokens(100)), ["a"])["a"]
    assert (answer.mode, answer.hit_tokens) == ("native", 96)


@pytest.mark.usefixtures("all_seeds")
@pytest.mark.parametrize("seed", ["1023", "1234", "123456"])
def test_small_seeds_and_those_that_people_type_are_found(seed: str) -> None:
    engine = feed(fleet_of(), Writer(HashScheme(seed=seed)).stored(tokens(100)))
    assert engine.scheme == HashScheme(seed=seed)


@pytest.mark.usefixtures("all_seeds")
@pytest.mark.parametrize("chain", [None, random_chain(9, 16)], ids=["large seed", "another maker"])
def test_a_scheme_that_no_seed_gives_is_learned_from_its_first_event(chain: Any) -> None:
    """The search ends soon: slices are at most 256 hashes, so the router's loop has them behind it in 2 s."""
    fleet = fleet_of()
    writer = Writer(HashScheme(seed="4294967295"), chain=chain) if chain else Writer(HashScheme(seed="1024"))
    for number in range(5):
        fleet.apply("a", batch(writer.stored(tokens(100, seed=number))))
        answer = fleet.predict(Prompt(tokens(100, seed=number)), ["a"])["a"]
        assert (answer.mode, answer.hit_tokens) == ("learned", 96)
    slices = 0
    while fleet.searching():
        fleet.engine("a").advance_detection()
        slices += 1
    assert slices < 400
    assert fleet.engine("a").detection is Detection.LEARNED


def test_an_unknown_seed_ends_in_learned_mode() -> None:
    fleet = fleet_of()
    engine = feed(fleet, Writer(SECRET).stored(tokens(100)))
    assert engine.detection is Detection.LEARNED
    answer = fleet.predict(Prompt(tokens(100)), ["a"])["a"]
    assert (answer.mode, answer.hit_tokens) == ("learned", 96)


IMAGE = MultimodalItem("image-1", 20, 30)
LORA = PromptExtras(lora_name="sql", lora_path="/adapters/sql")


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize(
    "extras",
    [
        LORA,
        PromptExtras(cache_salt="tenant"),
        PromptExtras("sql", "/adapters/sql", "tenant"),
        PromptExtras(multimodal=(IMAGE,)),
        PromptExtras(multimodal=(IMAGE, MultimodalItem("image-2", 50, 16))),
        PromptExtras("sql", "/adapters/sql", "tenant", (IMAGE,)),
    ],
    ids=["lora", "salt", "lora+salt", "image", "images", "all"],
)
def test_first_events_with_extra_keys(extras: PromptExtras, tagged: bool) -> None:
    scheme, fleet = HashScheme(tagged=tagged), fleet_of(lora_paths={"sql": "/adapters/sql"})
    prompt = tokens(150)
    engine = feed(fleet, Writer(scheme).stored(prompt, extras))
    assert engine.scheme == scheme
    assert predicted(fleet, prompt, extras) == 144
    before_the_image = 16 if extras.multimodal and not extras.lora_name else 0
    assert predicted(fleet, prompt) == before_the_image, "another prompt as far as the cache goes"


def test_an_adapter_of_unknown_path_proves_nothing() -> None:
    fleet = fleet_of()
    engine = feed(fleet, Writer(DEFAULT).stored(tokens(100), LORA))
    assert engine.detection is Detection.WAITING
    feed(fleet, Writer(DEFAULT).stored(tokens(100, seed=1)))
    assert engine.scheme == DEFAULT


def test_an_adapter_of_wrong_path_does_not_send_an_engine_to_learned_mode() -> None:
    fleet = fleet_of(lora_paths={"sql": "/elsewhere"})
    engine = feed(fleet, *[Writer(DEFAULT).stored(tokens(100, seed=n), LORA) for n in range(20)])
    assert engine.detection is Detection.WAITING
    feed(fleet, Writer(DEFAULT).stored(tokens(100)))
    assert engine.scheme == DEFAULT


def test_an_engine_that_serves_one_unknown_adapter_only_is_learned_in_the_end() -> None:
    fleet = fleet_of()
    prompts = [tokens(100, seed=n) for n in range(80)]
    engine = feed(fleet, *[Writer(DEFAULT).stored(prompt, LORA) for prompt in prompts])
    assert engine.detection is Detection.LEARNED
    assert predicted(fleet, prompts[0], PromptExtras("sql")) == 96
    assert predicted(fleet, prompts[0]) == 0


def test_learned_mode_ends_when_a_plain_event_matches_after_all() -> None:
    fleet = fleet_of()
    engine = feed(fleet, *[Writer(DEFAULT).stored(tokens(100, seed=n), LORA) for n in range(80)])
    assert engine.detection is Detection.LEARNED
    feed(fleet, *[Writer(DEFAULT).stored(tokens(100, seed=n)) for n in range(100, 180)])
    assert engine.scheme == DEFAULT
    assert predicted(fleet, tokens(100, seed=100)) == 96, "nothing that was stored before is lost"


def test_a_masked_root_event_settles_by_membership() -> None:
    engine = feed(fleet_of(), Writer(DEFAULT).stored(tokens(160), keep=[7, 8, 9]))
    assert engine.scheme == DEFAULT


def test_a_masked_root_event_of_an_unknown_seed_starts_no_search_immediately() -> None:
    """Its first block, which alone would show a salt, is hidden."""
    fleet = fleet_of()
    salted = PromptExtras(cache_salt="tenant")
    window = Writer(DEFAULT, kind=WINDOW, window=64)
    engine = feed(fleet, window.stored(tokens(160), salted, keep=[6, 7, 8, 9]))
    assert engine.detection is Detection.WAITING
    feed(fleet, window.stored(tokens(60)))
    assert engine.scheme == DEFAULT


def test_masked_root_events_alone_are_enough_for_a_search() -> None:
    scheme, fleet = HashScheme(seed="3"), fleet_of()
    window = Writer(scheme, kind=WINDOW, window=64)
    engine = feed(fleet, *[window.stored(tokens(160 + n, seed=n), keep=[6, 7, 8, 9]) for n in range(64)])
    assert engine.scheme == scheme


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_root_span_without_hashes_is_completed_by_its_child(as_bytes: bool) -> None:
    window = Writer(DEFAULT, kind=WINDOW, window=64, as_bytes=as_bytes)
    prompt, other = tokens(160), tokens(160, seed=5)
    root, stranger = window.stored(prompt, stop=6, keep=[]), window.stored(other, stop=4, keep=[])
    assert root.block_hashes == []
    fleet = fleet_of()
    engine = feed(fleet, root, stranger)
    assert engine.detection is Detection.WAITING
    feed(fleet, window.stored(tokens(160, seed=6), start=5, keep=[]))
    assert engine.detection is Detection.WAITING, "a child of neither"
    feed(fleet, window.stored(prompt, start=6, keep=[9]))
    assert engine.scheme == DEFAULT


def test_long_masked_spans_are_not_hashed_whole() -> None:
    window = Writer(DEFAULT, kind=WINDOW, window=64)
    long = tokens(40_000)
    engine = feed(fleet_of(), window.stored(long, keep=[2498, 2499]), window.stored(long, keep=[]))
    assert engine.detection is Detection.WAITING
    fleet = fleet_of()
    engine = feed(fleet, window.stored(long))
    assert engine.scheme == DEFAULT, "a full one shows its first block"


def test_extra_keys_deep_in_a_long_prompt_do_not_matter() -> None:
    image = PromptExtras(multimodal=(MultimodalItem("image", 36_000, 500),))
    engine = feed(fleet_of(), Writer(DEFAULT).stored(tokens(40_000), image))
    assert engine.scheme == DEFAULT


def test_events_that_start_elsewhere_are_not_looked_at() -> None:
    engine = feed(fleet_of(), Writer(DEFAULT).stored(tokens(160), start=2))
    assert engine.detection is Detection.WAITING
    assert engine.layout is not None


def test_a_settled_scheme_is_checked_again_and_given_up() -> None:
    fleet = fleet_of()
    engine = feed(fleet, Writer(DEFAULT).stored(tokens(100)))
    other = HashScheme(seed="1")
    feed(fleet, *[Writer(other).stored(tokens(100, seed=n)) for n in range(1, 63)])
    assert (engine.scheme, engine.scheme_mismatches) == (DEFAULT, 0), "only a sample is checked"
    feed(fleet, *[Writer(other).stored(tokens(100, seed=n)) for n in range(63, 67)])
    assert engine.scheme_mismatches == 3
    feed(fleet, Writer(other).stored(tokens(100, seed=99)))
    assert engine.scheme == other
    feed(fleet, *[Writer(other).stored(tokens(100, seed=n)) for n in range(63)])
    feed(fleet, *[Writer(DEFAULT).stored(tokens(100, seed=n)) for n in (100, 101)])
    assert (engine.scheme, engine.scheme_mismatches) == (other, 5), "those before do not count any more"


def test_one_odd_event_does_not_unsettle() -> None:
    fleet = fleet_of()
    engine = feed(fleet, Writer(DEFAULT).stored(tokens(100)))
    for round_ in range(5):
        feed(fleet, *[Writer(DEFAULT).stored(tokens(40, seed=n)) for n in range(63)])
        feed(fleet, Writer(SECRET).stored(tokens(40, seed=1000 + round_)))
        feed(fleet, Writer(DEFAULT).stored(tokens(40, seed=2000)))
    assert engine.scheme == DEFAULT
    assert engine.scheme_mismatches == 5


@pytest.mark.parametrize(
    "odd",
    [
        PromptExtras(cache_salt="tenant"),
        PromptExtras(multimodal=(MultimodalItem("image", 3, 5),)),
        PromptExtras("sql", "/moved"),
    ],
    ids=["hidden salt", "image that ends inside a block", "moved adapter"],
)
def test_partly_hidden_hashes_change_nothing(odd: PromptExtras) -> None:
    fleet = fleet_of(lora_paths={"sql": "/adapters/sql"})
    writer = Writer(DEFAULT, size=64)
    engine = feed(fleet, writer.stored(tokens(200)))
    assert engine.scheme == DEFAULT
    feed(fleet, *[writer.stored(tokens(200, seed=n), odd, keep=[1, 2]) for n in range(200)])
    assert engine.scheme == DEFAULT
    assert engine.scheme_mismatches == 0
    assert predicted(fleet, tokens(200)) == 192


def test_tagging_is_corrected_when_extra_keys_first_come() -> None:
    """A plain event fits tagged and untagged keys alike; the first event with keys tells."""
    untagged = HashScheme(tagged=False)
    fleet = fleet_of()
    engine = feed(fleet, Writer(untagged).stored(tokens(100)))
    assert engine.scheme == DEFAULT
    salted = PromptExtras(cache_salt="tenant")
    feed(fleet, *[Writer(untagged).stored(tokens(100, seed=n), salted) for n in range(64)])
    assert engine.scheme == untagged
    assert engine.scheme_mismatches == 0
    assert predicted(fleet, tokens(100, seed=1), salted) == 96


ODD_KEYS: list[Any] = [
    [5],
    [{"a": 1}],
    ["abc"],
    [[5]],
    [[["id"]]],
    [[["id", "x"]]],
    [[["id", 1.5]]],
    [[[1, 2]]],
    [[None, b"\x00"]],
    [[["id", 1, 2]]],
    [[["id", -(1 << 63)]]],
    [[["id", (1 << 64) - 1]], None, 3, [["id", 3]]],
]


@pytest.mark.parametrize("keys", ODD_KEYS, ids=str)
@pytest.mark.parametrize("scheme", [DEFAULT, SECRET], ids=["native", "learned"])
def test_unknown_extra_keys_change_nothing_else(keys: list[Any], scheme: HashScheme) -> None:
    writer, fleet = Writer(scheme), fleet_of()
    odd = writer.stored(tokens(100, seed=3))
    odd.extra_keys = keys
    engine = feed(fleet, odd, odd)
    assert engine.detection in {Detection.WAITING, Detection.NATIVE}
    feed(fleet, *[writer.stored(tokens(100, seed=n)) for n in range(10, 90)], odd, odd)
    assert engine.detection is (Detection.NATIVE if scheme == DEFAULT else Detection.LEARNED)
    assert predicted(fleet, tokens(100, seed=10)) == 96


@pytest.mark.parametrize(
    "wrong", [b"\xc0", b"\xa3abc", b"\x92\x01\xa1a", b"\xdd\x00\x00\x00\x60", b"\x81\x01\x02"]
)
def test_token_ids_that_are_no_integers(wrong: bytes) -> None:
    writer, fleet = Writer(SECRET), fleet_of()
    odd = writer.stored(tokens(16))
    odd.token_ids = msgspec.Raw(wrong)
    engine = feed(fleet, odd)
    assert engine.detection is Detection.WAITING
    feed(fleet, writer.stored(tokens(100)), odd)
    assert engine.detection is Detection.LEARNED
    assert predicted(fleet, tokens(100)) == 96


def test_huge_and_negative_token_ids_hash_like_any() -> None:
    odd = [-1, (1 << 64) - 1, 0, 1 << 40] * 8
    for scheme in (DEFAULT, HashScheme(algo="sha256_cbor"), SECRET):
        fleet = fleet_of()
        feed(fleet, Writer(scheme).stored([*odd, 1]))
        assert predicted(fleet, [*odd, 1]) == 32


def test_an_event_of_blocks_without_tokens_is_refused() -> None:
    writer, fleet = Writer(DEFAULT), fleet_of()
    odd = writer.stored(tokens(100))
    odd.token_ids = encode_tokens([])
    engine = feed(fleet, odd)
    assert engine.rejected == {"tokens_do_not_fill_blocks": 1}
    assert engine.layout is None
    assert fleet.stats().blocks == 0


def test_seeds_beyond_the_last_searched_are_unknown() -> None:
    fleet = fleet_of()
    assert feed(fleet, Writer(HashScheme(seed="100")).stored(tokens(100))).detection is Detection.LEARNED


def test_the_default_seed_is_vllms() -> None:
    assert DEFAULT_SEED == "vllm-none-hash"


def test_random_bytes_are_never_taken_for_a_scheme() -> None:
    fleet = fleet_of()
    engine = feed(fleet, Writer(DEFAULT, chain=random_chain(1, 16)).stored(tokens(100)))
    assert engine.detection is Detection.LEARNED


# Engines whose beginnings of prompts are hidden: chunked local attention and windows alone.


def chunk_engine(scheme: HashScheme, **options: Any) -> Writer:
    return Writer(scheme, kind="chunked_local_attention", size=16, **options)


def turns(writer: Writer, count: int, *, first: int = 0) -> list[BlockStored]:
    """Prompts of 100 tokens each, of which the engine tells the blocks after the first chunk of 64."""
    return [writer.stored(tokens(100, seed=first + n), start=4) for n in range(count)]


@pytest.mark.parametrize(
    "scheme", [DEFAULT, HashScheme(algo="sha256_cbor"), HashScheme(algo="xxhash", seed="42")]
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_placed_prompt_proves_the_scheme_of_blocks_told_of(scheme: HashScheme, as_bytes: bool) -> None:
    fleet = fleet_of(attention_chunk_size=64)
    engine = feed(fleet, *turns(chunk_engine(scheme, as_bytes=as_bytes), 10))
    assert engine.detection is Detection.WAITING
    for n in range(10):
        fleet.predict(Prompt(tokens(120, seed=n)), ["a"])
        engine.finish_detection()
    assert engine.scheme == scheme
    assert predicted(fleet, tokens(100, seed=0)) == 96


def test_a_prompt_with_the_same_block_after_another_beginning_proves_nothing() -> None:
    fleet = fleet_of(attention_chunk_size=64)
    engine = feed(fleet, *turns(chunk_engine(SECRET), 1))
    other = tokens(64, seed=7) + tokens(100, seed=0)[64:]
    fleet.predict(Prompt(other), ["a"])
    engine.finish_detection()
    assert engine.detection is Detection.WAITING


def test_the_parents_hash_proves_the_algorithm_where_it_is_whole() -> None:
    """And with it the default seed is assumed immediately."""
    scheme = HashScheme(algo="sha256_cbor", seed="77")
    for as_bytes, assumed in ((True, HashScheme(algo="sha256_cbor")), (False, None)):
        window = Writer(scheme, kind=WINDOW, window=64, as_bytes=as_bytes)
        engine = feed(fleet_of(), window.stored(tokens(160), start=6))
        assert (engine.assumed, engine.unproven) == (assumed, True)


def test_an_assumption_is_reported_and_never_too_high() -> None:
    """Chunk starts are hits whatever the scheme is, so with chunked local attention alone nothing waits."""
    fleet = fleet_of(attention_chunk_size=64)
    engine = feed(fleet, *turns(chunk_engine(SECRET), 8))
    assert engine.mode == "assumed"
    assert answered(fleet, 50) == ("assumed", 64), "the start of a chunk needs no block"
    assert answered(fleet, 3) == ("assumed", 64), "the engine has 96"
    fleet.forget("a")
    assert answered(fleet, 50) == ("assumed", 64), "the engine that comes back is expected to be like it"


def test_other_layouts_are_waited_for_before_anything_is_assumed() -> None:
    fleet, window = fleet_of(), Writer(SECRET, kind=WINDOW, window=64)
    feed(fleet, *[window.stored(tokens(160, seed=n), start=6, keep=[9]) for n in range(7)])
    assert answered(fleet, 50) == ("learned", 0)
    feed(fleet, window.stored(tokens(160, seed=7), start=6, keep=[9]))
    assert answered(fleet, 50) == ("assumed", 0)


def test_a_search_takes_no_assumption_back_and_ends_where_it_is_proven() -> None:
    fleet = fleet_of(attention_chunk_size=64)
    fleet.apply("a", batch(*turns(chunk_engine(DEFAULT), 8)))
    engine = fleet.engine("a")
    other = PromptExtras(cache_salt="tenant")
    fleet.predict(Prompt(tokens(100, seed=0), other), ["a"])
    assert engine.detection is Detection.SEARCHING, "the engine's block stands in a prompt that it is not of"
    assert answered(fleet, 50) == ("assumed", 64)
    assert answered(fleet, 1) == ("assumed", 96)
    assert engine.detection is Detection.NATIVE


def test_an_assumption_that_matches_is_proven() -> None:
    fleet = fleet_of(attention_chunk_size=64)
    engine = feed(fleet, *turns(chunk_engine(DEFAULT), 400))
    assert engine.mode == "assumed"
    assert answered(fleet, 0)[1] == 96, "told too long ago to be remembered, but still held"
    assert engine.detection is Detection.NATIVE


def test_receipts_that_report_more_take_an_assumption_back() -> None:
    fleet = fleet_of(attention_chunk_size=64)
    engine = feed(fleet, *turns(chunk_engine(SECRET), 8))
    engine.doubt()
    engine.doubt()
    assert engine.mode == "assumed"
    engine.doubt()
    assert engine.mode == "waiting"
    assert engine.doubted
    assert answered(fleet, 50) == ("learned", 64)


def test_the_schemes_of_the_fleet_are_assumed_first() -> None:
    fleet, scheme = fleet_of(attention_chunk_size=64), HashScheme(algo="sha256_cbor", seed="5")
    feed(fleet, Writer(scheme).stored(tokens(100)))
    fleet.apply("b", batch(*turns(chunk_engine(scheme), 8)))
    assert fleet.engine("b").assumed == scheme


@pytest.mark.parametrize(
    "extras",
    [
        PromptExtras(cache_salt="tenant"),
        PromptExtras("sql", "/adapters/sql"),
        PromptExtras(multimodal=(MultimodalItem("image-1", 3, 40),)),
        PromptExtras(multimodal=(MultimodalItem("image-1", 16, 40),)),
    ],
    ids=["salt", "lora", "image", "image in the look-ahead"],
)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_numeric_seed_where_every_prompt_has_extra_keys(extras: PromptExtras, lookahead: int) -> None:
    scheme = HashScheme(seed="42", lookahead=lookahead)
    fleet = fleet_of(lora_paths={"sql": "/adapters/sql"})
    engine = feed(fleet, *[Writer(scheme).stored(tokens(100, seed=n), extras) for n in range(8)])
    assert engine.scheme == scheme
    assert predicted(fleet, tokens(100, seed=0), extras) == 96


@pytest.mark.parametrize(
    ("extras", "after"),
    [
        (PromptExtras(cache_salt="tenant"), 1),
        (PromptExtras("sql", "/adapters/sql", "tenant"), 1),
        (PromptExtras(cache_salt="tenant", multimodal=(MultimodalItem("image-1", 16, 40),)), 1),
        (PromptExtras(cache_salt="tenant", multimodal=(MultimodalItem("image-1", 3, 40),)), 8),
    ],
    ids=["salt", "lora", "salt, image later", "salt and image"],
)
def test_a_first_block_that_shows_its_keys_is_searched_with_immediately(
    extras: PromptExtras, after: int
) -> None:
    scheme, fleet = HashScheme(seed="42"), fleet_of(lora_paths={"sql": "/adapters/sql"})
    found_after = 0
    for n in range(after):
        found_after = n + 1
        if feed(fleet, Writer(scheme).stored(tokens(100, seed=n), extras)).scheme == scheme:
            break
    assert found_after == after
    assert fleet.engine("a").scheme == scheme


def test_a_placed_prompt_is_searched_with_immediately() -> None:
    """The one masked event hides its salt; the prompt shows it."""
    scheme, fleet = HashScheme(seed="42"), fleet_of()
    salted = PromptExtras(cache_salt="tenant")
    prompt = tokens(160)
    engine = feed(fleet, Writer(scheme, kind=WINDOW, window=64).stored(prompt, salted, keep=[6, 7, 8, 9]))
    assert engine.detection is Detection.WAITING
    fleet.predict(Prompt(prompt, salted), ["a"])
    engine.finish_detection()
    assert engine.scheme == scheme


def test_a_search_on_weak_evidence_gives_up_nothing() -> None:
    """An adapter moved: its events fit no seed. A plain event still settles the scheme."""
    fleet = fleet_of(lora_paths={"sql": "/elsewhere"})
    engine = feed(
        fleet, *[Writer(HashScheme(seed="42")).stored(tokens(100, seed=n), LORA) for n in range(30)]
    )
    assert engine.detection is Detection.WAITING
    feed(fleet, Writer(HashScheme(seed="42")).stored(tokens(100)))
    assert engine.scheme == HashScheme(seed="42")


def test_a_numeric_seed_of_root_spans_without_hashes() -> None:
    scheme, fleet = HashScheme(algo="xxhash", seed="42"), fleet_of()
    window = Writer(scheme, kind=WINDOW, window=64)
    events = []
    for n in range(8):
        prompt = tokens(160, seed=n)
        events += [window.stored(prompt, stop=6, keep=[]), window.stored(prompt, start=6, keep=[9])]
    assert feed(fleet, *events).scheme == scheme


def test_a_search_with_a_span_that_has_no_child_is_not_the_last_one() -> None:
    """Two groups tell the same; the shortest prompt is over with its first chunk."""
    scheme, fleet = HashScheme(algo="xxhash", seed="42"), fleet_of()
    windows = [Writer(scheme, kind=WINDOW, window=64, group=group) for group in range(2)]
    events = [window.stored(tokens(64, seed=999), keep=[]) for window in windows]
    for n in range(40):
        prompt = tokens(160, seed=n)
        events += [window.stored(prompt, stop=6, keep=[]) for window in windows]
        events += [window.stored(prompt, start=6, keep=[9]) for window in windows]
    engine = feed(fleet, *events[:16])
    assert engine.detection is Detection.WAITING
    assert feed(fleet, *events[16:]).scheme == scheme


def test_equal_tokens_under_other_keys_are_no_evidence() -> None:
    """Many tenants send the same beginning: only blocks of the prompt's own salt are worth a search."""
    scheme, fleet = HashScheme(seed="42"), fleet_of(attention_chunk_size=64)
    image = MultimodalItem("image-1", 3, 40)
    tenants = [PromptExtras(cache_salt=f"tenant-{n}", multimodal=(image,)) for n in range(4)]
    for salted in tenants[:3]:
        feed(fleet, Writer(scheme).stored(tokens(100), salted))
    fleet.predict(Prompt(tokens(100), tenants[3]), ["a"])
    assert fleet.engine("a").detection is Detection.WAITING
    fleet.predict(Prompt(tokens(100), tenants[0]), ["a"])
    assert fleet.engine("a").detection is Detection.SEARCHING
    fleet.engine("a").finish_detection()
    assert fleet.engine("a").scheme == scheme


def test_a_prompt_that_goes_on_otherwise_is_no_evidence_where_hashes_look_ahead() -> None:
    """Else it would be searched without success, and the number of searches is bounded."""
    scheme, fleet = HashScheme(seed="42", lookahead=1), fleet_of()
    shown = PromptExtras(cache_salt="tenant", multimodal=(MultimodalItem("image-1", 3, 10),))
    engine = feed(fleet, Writer(scheme).stored(tokens(40), shown))
    for n in range(5):
        fleet.predict(Prompt(tokens(16) + tokens(40, seed=1 + n), shown), ["a"])
        assert engine.detection is Detection.WAITING
    fleet.predict(Prompt(tokens(17) + tokens(40, seed=1), shown), ["a"])
    assert engine.detection is Detection.SEARCHING
    engine.finish_detection()
    assert engine.scheme == scheme


@pytest.mark.parametrize("keep", [[9], [2, 9]])
def test_other_images_of_the_same_tokens_are_no_evidence_in_masked_events_either(keep: list[int]) -> None:
    scheme, fleet = HashScheme(seed="42"), fleet_of()
    images = [PromptExtras(multimodal=(MultimodalItem(f"image-{n}", 20, 135),)) for n in range(4)]
    engine = feed(fleet, Writer(scheme, kind=WINDOW, window=64).stored(tokens(160), images[0], keep=keep))
    for other in images[1:]:
        fleet.predict(Prompt(tokens(160), other), ["a"])
        assert engine.detection is Detection.WAITING
    fleet.predict(Prompt(tokens(160), images[0]), ["a"])
    assert engine.detection is Detection.SEARCHING
    engine.finish_detection()
    assert engine.scheme == scheme


def test_blocks_after_another_beginning_use_up_no_other_searches() -> None:
    scheme, fleet = HashScheme(seed="42"), fleet_of()
    window = Writer(scheme, kind=WINDOW, window=64)
    engine = feed(fleet, window.stored(tokens(160), start=6))
    for n in range(5):
        fleet.predict(Prompt(tokens(96, seed=1 + n) + tokens(160)[96:]), ["a"])
        engine.finish_detection()
    assert engine.detection is Detection.WAITING
    feed(fleet, window.stored(tokens(160, seed=9), keep=[6, 7, 8, 9]))
    fleet.predict(Prompt(tokens(160, seed=9)), ["a"])
    engine.finish_detection()
    assert engine.scheme == scheme


def test_nothing_is_searched_with_twice() -> None:
    """One prompt with another beginning is asked for again and again."""
    scheme, fleet = HashScheme(seed="42"), fleet_of()
    engine = feed(fleet, Writer(scheme, kind=WINDOW, window=64).stored(tokens(160), start=6))
    for _ in range(5):
        fleet.predict(Prompt(tokens(96, seed=1) + tokens(160)[96:]), ["a"])
        engine.finish_detection()
    assert engine.detection is Detection.WAITING
    fleet.predict(Prompt(tokens(160)), ["a"])
    engine.finish_detection()
    assert engine.scheme == scheme


def test_placed_prompts_are_searched_with_whatever_else_was() -> None:
    scheme, fleet = HashScheme(seed="42"), fleet_of(lora_paths={"sql": "/elsewhere"})
    engine = feed(fleet, *[Writer(scheme).stored(tokens(100, seed=n), LORA) for n in range(30)])
    assert engine.detection is Detection.WAITING
    moved = PromptExtras(cache_salt="tenant")
    window = Writer(scheme, kind=WINDOW, window=64)
    feed(fleet, window.stored(tokens(160), moved, keep=[6, 7, 8, 9]))
    fleet.predict(Prompt(tokens(160), moved), ["a"])
    engine.finish_detection()
    assert engine.scheme == scheme


def answered(fleet: FleetResidency, seed: int) -> tuple[str, int]:
    found = fleet.predict(Prompt(tokens(100, seed=seed)), ["a"])["a"]
    return found.mode, found.hit_tokens


@pytest.mark.parametrize(("start", "length", "shown"), [(5, 40, 43), (0, 1, 16), (20, 30, 44), (31, 2, 17)])
def test_an_image_reaches_to_the_end_of_the_last_block_that_lists_it(
    start: int, length: int, shown: int
) -> None:
    extras = PromptExtras(multimodal=(MultimodalItem("image-1", start, length),))
    found = event_extras(Writer(DEFAULT).stored(tokens(64), extras), {})
    assert found == PromptExtras(multimodal=(MultimodalItem("image-1", start, shown),))
