"""Savings of the caches are never visible: ids and hashes are those of a reader that never saw anything."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras, block_hashes
from kvatlas.router.prompts.conversation import Conversation, KnownMessage, Turn, common_tokens
from kvatlas.router.prompts.prefix_keys import message_keys, token_keys
from kvatlas.router.prompts.prompt_cache import PrefixCache
from kvatlas.router.prompts.reader import Prompt, PromptReader, PromptSettings
from kvatlas.router.prompts.request import ChatBody
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.truncation import ids_of
from tests.support.examples import examples
from tests.support.prompts import cases
from tests.support.prompts.readers import (
    byte_level_tokenizer,
    chat,
    local_reader,
    metaspace_tokenizer,
    model_dir,
    read_exact,
    request,
    say,
)
from tests.support.waiting import run

SCHEME = HashScheme()
SCHEMES = (
    SCHEME,
    HashScheme(algo="sha256_cbor", hash_block_size=32),
    HashScheme(hash_block_size=8, lookahead=2),
)
CHUNKS = ["Hello", " world", "\n", "é", "<|im_end|>", "日本", "12345", "<think>", "  ", "{}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("m"), "thinking_tools")


def fresh(folder: Path) -> PromptReader:
    return local_reader(folder)


def conversation(rng: random.Random, num_turns: int) -> list[dict[str, Any]]:
    text = lambda: "".join(rng.choices(CHUNKS, k=rng.randint(1, 40)))  # noqa: E731
    messages = [say("system", text())]
    for _ in range(num_turns):
        messages += [say("user", text()), say("assistant", text())]
    return messages


def test_growing_branching_chats_equal_cold_ones(folder: Path) -> None:
    rng = random.Random(5)
    warm, other, cold = fresh(folder), fresh(folder), []
    for _ in range(12):
        messages = conversation(rng, 4)
        for end in (2, 4, 4, 6, 8):
            cold.append(chat(*messages[:end]))
            cold.append(chat(*messages[: end - 1], say("user", f"other question {rng.random()}")))
            cold.append(chat(*messages[:end], tools=cases.TOOLS))
    for body in cold:
        prompt = read_exact(warm, body)
        expected = forgetful_prompt(other, body).token_ids
        assert prompt.token_ids == expected
        for scheme in SCHEMES:
            assert prompt.hashes(scheme) == block_hashes(expected, scheme)
    warm._cache.check_integrity()
    stats = warm.stats
    assert stats.prefix_hits > 100
    assert stats.tokens_reused > stats.tokens_new
    assert stats.blocks_reused > stats.blocks_hashed


def test_another_short_question_after_the_same_messages_takes_the_place_of_the_last(folder: Path) -> None:
    warm, other = fresh(folder), fresh(folder)
    history = [say("system", "Be brief. " * 300), say("user", "Hi."), say("assistant", "Hello. " * 300)]
    for number in range(5):
        body = chat(*history, say("user", f"Question {number}?"))
        prompt = read_exact(warm, body)
        assert prompt.token_ids == forgetful_prompt(other, body).token_ids
        assert prompt.hashes(SCHEME) == block_hashes(prompt.token_ids, SCHEME)
        assert len(warm._cache) == 1
    answered = [say("user", "Question 1?"), say("assistant", "Yes.")]  # a turn after one that is dropped
    new, reused = warm.stats.tokens_new, warm.stats.tokens_reused
    read_exact(warm, chat(*history, *answered, say("user", "Sure?")))
    assert warm.stats.tokens_new - new < 100
    assert warm.stats.tokens_reused - reused > 1000
    warm._cache.check_integrity()


@pytest.mark.parametrize(
    ("before", "last", "other"),
    [
        (["Be brief. " * 300], "A document. " * 100, "Another? "),  # long: tokenizing it again takes time
        (["Be brief. " * 300, "Hi.", "Hello."], "Why?", "Another? "),
    ],
    ids=["long last message", "other conversation"],
)
def test_a_prompt_that_costs_more_to_make_again_stays(
    folder: Path, before: list[str], last: str, other: str
) -> None:
    warm = fresh(folder)
    roles = ["system", "user", "assistant"]
    messages = [say(role, text) for role, text in zip(roles, before, strict=False)]
    read_exact(warm, chat(*messages, say("user", last)))
    read_exact(warm, chat(messages[0], say("user", other)))
    assert len(warm._cache) == 2


def forgetful_prompt(reader: PromptReader, body: dict[str, Any]) -> Prompt:
    """The prompt from a reader whose caches are emptied before."""
    local = reader.local_model("m")
    local._cache = PrefixCache(PromptStats(), 0)
    return read_exact(reader, body)


def test_a_message_that_goes_on_where_another_ended(folder: Path) -> None:
    warm, other = fresh(folder), fresh(folder)
    text = "The router asks which engine holds the longest prefix of this prompt"
    for end in (*range(len(text)), *range(len(text), 0, -1)):
        body = chat(say("system", "Be brief."), say("user", text[:end]), say("assistant", "Yes."))
        assert read_exact(warm, body).token_ids == forgetful_prompt(other, body).token_ids
    assert warm.stats.prefix_hits > 100


def test_colliding_keys_do_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvatlas.router.prompts.local_model.message_keys", lambda scope, raws: [7] * len(raws)
    )
    monkeypatch.setattr("kvatlas.router.prompts.prompt_cache.token_keys", lambda scope, ids: [8])
    warm, other = fresh(folder), fresh(folder)
    rng = random.Random(4)
    for _ in range(60):
        fields: dict[str, Any] = rng.choice(
            [{}, {"tools": cases.TOOLS}, {"cache_salt": "x"}, {"reasoning_effort": "low"}]
        )
        body = chat(*conversation(random.Random(rng.randint(0, 2)), 2), **fields)
        prompt = read_exact(warm, body)
        assert prompt.token_ids == forgetful_prompt(other, body).token_ids
        assert prompt.hashes(SCHEME) == block_hashes(prompt.token_ids, SCHEME, prompt.extras)
        ids = list(range(rng.randint(40, 42)))
        completion = read_exact(
            warm, {"prompt": ids, **{k: v for k, v in fields.items() if k == "cache_salt"}}, "/v1/completions"
        )
        assert list(completion.token_ids) == ids
        assert completion.hashes(SCHEME) == block_hashes(ids, SCHEME, completion.extras)


def test_hashes_are_not_inherited_across_extras() -> None:
    ids = ids_of(range(64))
    parent = Turn(ids, PromptExtras(cache_salt="x"))
    parent.chains[SCHEME] = HashChain(SCHEME, parent.extras)
    parent.chains[SCHEME].extend(ids)
    child, sibling = Turn(ids, PromptExtras()), Turn(ids, parent.extras)
    child.inherit(parent, 64, last=False)
    sibling.inherit(parent, 40, last=False)
    assert child.chains == {}
    assert sibling.chains[SCHEME].hashes == parent.chains[SCHEME].hashes[:2]


def test_hashes_that_are_handed_over_stay_valid_for_their_holder() -> None:
    ids = ids_of(range(64))
    parent, child = (Turn(ids, PromptExtras()) for _ in range(2))
    chain = parent.chains[SCHEME] = HashChain(SCHEME, parent.extras)
    held, before = chain.extend(ids), block_hashes(ids, SCHEME)
    child.inherit(parent, 40, last=True)
    other = ids_of([*range(40), *range(100, 140)])
    assert child.chains[SCHEME].extend(other) == block_hashes(other, SCHEME)
    assert held == before
    assert parent.chains == {}, "two prompts must not extend one chain"


def test_a_next_turn_tokenizes_and_hashes_only_what_is_new(folder: Path) -> None:
    reader = fresh(folder)
    messages = conversation(random.Random(1), 20)
    first = read_exact(reader, chat(*messages[:-1]))
    first.hashes(SCHEME)
    tokens, blocks = reader.stats.tokens_new, reader.stats.blocks_hashed
    after = read_exact(reader, chat(*messages, say("user", "And now?")))
    after.hashes(SCHEME)
    assert len(after.token_ids) > len(first.token_ids)
    assert reader.stats.tokens_new - tokens < 100
    assert reader.stats.blocks_hashed - blocks < 10
    assert len(reader._cache) == 1  # the shorter prompt is part of the longer one


def test_a_branch_leaves_the_other_branch_its_hashes(folder: Path) -> None:
    reader = fresh(folder)
    messages = conversation(random.Random(3), 20)
    branches = [chat(*messages, say("user", f"And {number}?")) for number in range(2)]
    longer = chat(*messages, say("user", "And 0?"), say("assistant", "Yes."), say("user", "Why?"))
    for body in branches:
        read_exact(reader, body).hashes(SCHEME)
    blocks = reader.stats.blocks_hashed
    read_exact(reader, longer).hashes(SCHEME)
    assert reader.stats.blocks_hashed - blocks < 10


def test_hashes_of_a_thread_are_a_separate_chain(folder: Path) -> None:
    reader = fresh(folder)
    prompt = read_exact(reader, chat(say("user", "Hello there, " * 9)))
    prompt.hashes(SCHEME)
    prompt.forked_chain(SCHEME).extend(prompt.token_ids * 2)
    assert prompt.hashes(SCHEME) == block_hashes(prompt.token_ids, SCHEME)


def test_an_exact_repeat_does_nothing(folder: Path) -> None:
    reader = fresh(folder)
    body = chat(say("user", "Hello"), tools=cases.TOOLS)
    first, rendered = read_exact(reader, body), reader.stats.rendered
    again = read_exact(reader, body)
    assert again.token_ids is first.token_ids
    assert reader.stats.rendered == rendered


def test_chats_with_other_fields_are_never_mixed_up(folder: Path) -> None:
    reader = local_reader(folder, lora_paths={"a": "/a", "b": "/b"})
    bodies = [
        chat(say("user", "Hello there, " * 9), **fields)
        for fields in (
            {},
            {"tools": cases.TOOLS},
            {"tools": cases.TOOLS[:1]},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"add_generation_prompt": False},
            {"reasoning_effort": "low"},
            {"reasoning_effort": "high"},
            {"cache_salt": "x"},
            {"cache_salt": "y"},
            {"add_special_tokens": True},
            {"truncate_prompt_tokens": 20},
        )
    ]
    for _ in range(2):
        for body in bodies:
            for model in ("m", "a", "b"):
                prompt = read_exact(reader, body, model=model)
                salt = body.get("cache_salt")
                lora = {"lora_name": model, "lora_path": f"/{model}"} if model != "m" else {}
                assert prompt.extras == PromptExtras(cache_salt=salt, **lora)
                assert prompt.hashes(SCHEME) == block_hashes(prompt.token_ids, SCHEME, prompt.extras)
    # Salts are no tokens, and this tokenizer adds no special ones: three bodies look like the first.
    assert len({tuple(read_exact(reader, body).token_ids) for body in bodies}) == len(bodies) - 3
    for body in bodies:
        assert len({tuple(read_exact(reader, body, model=m).hashes(SCHEME)) for m in "mab"}) == 3
    assert len({tuple(read_exact(reader, body).hashes(SCHEME)) for body in (bodies[0], *bodies[7:9])}) == 3


def test_a_chat_of_messages_alone_is_known_to_one_that_says_what_holds_anyway(folder: Path) -> None:
    warm, cold = fresh(folder), fresh(folder)
    messages = [say("system", "Be brief."), say("user", "Hello"), say("assistant", "Hi"), say("user", "So?")]
    alone = read_exact(warm, chat(*messages[:2]))
    hits = warm.stats.prefix_hits
    for fields in ({}, {"max_tokens": 5}, {"tool_choice": "auto"}, {"documents": None, "tools": None}):
        prompt = read_exact(warm, chat(*messages, **fields))
        assert prompt.token_ids == read_exact(cold, chat(*messages)).token_ids
        assert prompt.token_ids[: alone.num_tokens - 5] == alone.token_ids[:-5]
        hits += 1
        assert warm.stats.prefix_hits == hits
    other = read_exact(warm, chat(*messages, add_generation_prompt=False))
    assert other.token_ids != prompt.token_ids
    assert warm.stats.prefix_hits == hits


def test_tokens_of_another_library_are_not_continued(folder: Path) -> None:
    warm, body = fresh(folder), chat(say("user", "Hello"))
    read_exact(warm, body)
    local = warm.local_model("m")
    local.tokenizer.name = "tokenizers (fastokens gave other tokens for a prompt)"
    hits = warm.stats.prefix_hits
    read_exact(warm, body)
    assert warm.stats.prefix_hits == hits
    read_exact(warm, body)
    assert warm.stats.prefix_hits == hits + 1


@pytest.mark.parametrize("form", ["string", "openai"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_plain_message_is_what_any_other_becomes(folder: Path, role: str, form: str) -> None:
    local = local_reader(folder, chat_template_content_format=form).local_model("m")
    renderer, template = local.renderer, local.renderer.templates[False]
    assert template is not None
    for text in ("", "Hello", "日本 é\n", "x" * 5000):
        raw = msgspec.Raw(msgspec.json.encode({"content": text, "role": role}))
        (plain,) = renderer.plain([raw], template)
        context = renderer.form_of(ChatBody(messages=[raw]), None)
        ((expected,), _) = renderer.render(ChatBody(messages=[raw]), [], context)
        assert (plain.raw, plain.shape) == (expected.raw, expected.shape)
        assert plain.as_message(form) == expected.as_message(form)
    others = ({"role": role}, {"role": role, "content": None}, {"role": role, "content": "x", "name": "n"})
    for other in (*others, {"role": "system", "content": "x"}, {"role": role, "content": ["x"]}, 5):
        encoded = msgspec.Raw(msgspec.json.encode(other))
        assert renderer.plain([encoded, raw], template) == []
        assert len(renderer.plain([raw, encoded, raw], template)) == 1


def test_completions_share_hashes_by_tokens(folder: Path) -> None:
    reader = fresh(folder)
    path = "/v1/completions"
    base = [number % 500 for number in range(3000)]
    for ids in (base[:1000], base[:2000], base[:1500] + [7] * 9, base, base[:2999], base):
        prompt = read_exact(reader, {"prompt": ids}, path)
        assert list(prompt.token_ids) == ids
        assert prompt.hashes(SCHEME) == block_hashes(ids, SCHEME)
    assert reader.stats.blocks_reused > 3 * reader.stats.blocks_hashed / 2
    reader._cache.check_integrity()


WORDS = "The router asks which engine holds the longest prefix of this prompt, and sends it there. "


def test_a_long_message_that_ends_otherwise_is_tokenized_from_near_there_on(folder: Path) -> None:
    reader, other = fresh(folder), fresh(folder)
    bodies = [chat(say("system", "Be brief."), say("user", WORDS * 400 + end)) for end in ("One.", "Two?")]
    read_exact(reader, bodies[0])
    tokens, jobs = reader.stats.tokens_new, reader.stats.worker_jobs
    after = read_exact(reader, bodies[1])
    assert after.token_ids == forgetful_prompt(other, bodies[1]).token_ids
    assert reader.stats.tokens_new - tokens < 1000 < len(after.token_ids)
    assert reader.stats.worker_jobs == jobs, "so little needs no thread"


@pytest.mark.parametrize("kind", [byte_level_tokenizer(), metaspace_tokenizer()])
@pytest.mark.parametrize("special", [True, False])
def test_completions_of_a_growing_text_are_those_of_the_whole(
    tmp_path: Path, kind: str, special: bool
) -> None:
    reader = local_reader(model_dir(tmp_path, "chatml", tokenizer=kind))
    reference = Tokenizer.from_str(kind)
    rng = random.Random(8)
    text = WORDS * 40
    for turn in range(30):
        cut = len(text) - rng.choice((0, 0, 1, 700, 2500))
        text = text[:cut] + "".join(rng.choices([*CHUNKS, WORDS], k=rng.randint(1, 20)))
        for salt in (None, "x"):
            fields = {"prompt": text, "add_special_tokens": special, "cache_salt": salt}
            if turn % 7 == 3:
                fields["truncate_prompt_tokens"] = 600
            prompt = read_exact(reader, fields, "/v1/completions")
            expected = reference.encode(text, add_special_tokens=special).ids
            if turn % 7 != 3:
                assert prompt.token_ids.tolist() == expected
            elif not special:
                assert prompt.token_ids.tolist() == expected[-600:]
            assert prompt.hashes(SCHEME) == block_hashes(prompt.token_ids, SCHEME, prompt.extras)
    reader._cache.check_integrity()


def test_completions_of_a_growing_text_compute_only_what_is_new(folder: Path) -> None:
    reader, path = fresh(folder), "/v1/completions"
    read_exact(reader, {"prompt": WORDS * 400}, path).hashes(SCHEME)
    tokens, blocks = reader.stats.tokens_new, reader.stats.blocks_hashed
    grown = read_exact(reader, {"prompt": WORDS * 400 + "And now?"}, path)
    grown.hashes(SCHEME)
    assert reader.stats.tokens_new - tokens < 1000 < len(grown.token_ids)
    assert reader.stats.blocks_hashed - blocks < 10
    assert read_exact(reader, {"prompt": WORDS * 400 + "And now?"}, path).token_ids is grown.token_ids


def test_long_prompts_take_the_worker_and_give_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = conversation(random.Random(2), 3)
    messages[1]["content"] = "A long text, 日本. " * 20000
    body = chat(*messages[:-1])
    for directory in (folder, model_dir(tmp_path, "chatml", tokenizer=metaspace_tokenizer())):
        inline, threaded = fresh(directory), fresh(directory)
        with monkeypatch.context() as unbounded:
            unbounded.setattr("kvatlas.router.prompts.local_model.INLINE_CHARS_MAX", 10**9)
            unbounded.setattr("kvatlas.router.prompts.reader.INLINE_BLOCKS_MAX", 10**9)
            expected = read_exact(inline, body)

        async def ask(reader: PromptReader = threaded) -> tuple[Prompt, list[int]]:
            prompt = await reader.read(request(body))
            assert isinstance(prompt, Prompt)
            return prompt, list(await reader.hashes(prompt, SCHEME))

        prompt, hashes = run(ask())
        assert prompt.token_ids == expected.token_ids
        assert hashes == block_hashes(expected.token_ids, SCHEME)
        assert threaded.stats.worker_jobs >= 3


def test_the_prefix_cache_is_bounded(folder: Path) -> None:
    reader = local_reader(folder, PromptSettings(prefix_cache_bytes_max=100_000))
    rng = random.Random(3)
    for _ in range(60):
        read_exact(reader, chat(*conversation(rng, 3)[:-1])).hashes(SCHEME)
        assert reader.stats.prefix_bytes <= 100_000
        reader._cache.check_integrity()
    assert reader.stats.prefix_evictions > 20


@settings(max_examples=examples(200))
@example([[0, 1], [0], [1, 0], [1, 1], [0, 1, 0], [1], [0]], 5064, False)  # sizes of objects differ by Python
@example([[0, 1], [0], [1, 0], [1, 1], [0, 1, 0], [1], [0]], 5104, True)
@example([[0, 0], [0], [0, 0, 0], [0]], 5400, True)  # too large a turn; another shares its start
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=30),
    st.integers(3000, 20000),
    st.booleans(),
)
def test_the_index_always_proposes_the_longest_live_prefix(
    sequences: list[list[int]], bytes_max: int, in_place: bool
) -> None:
    cache = PrefixCache(PromptStats(), bytes_max)
    for sequence in sequences:
        raws = [msgspec.Raw(str(number).encode()) for number in sequence]
        keys = message_keys(b"s", raws)
        found = cache.find(b"s", keys, raws)
        assert cache.find(b"t", keys, raws) is None
        live = [[one.raw for one in e.messages] for e in cache._kept.values()]
        longest = max((sum(1 for _ in _common(raws, other)) for other in live), default=0)
        assert (found.shared if found else 0) == longest
        known = [KnownMessage(raw, "", "", 0, 34) for raw in raws]
        one = Conversation(b"s", keys, Turn(ids_of(sequence), PromptExtras()), known)
        if found is None or not in_place:
            cache.put(one)
        else:
            cache.put_next(one, found)
        cache.check_integrity()


def _common(left: list[msgspec.Raw], right: list[msgspec.Raw]) -> list[msgspec.Raw]:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return left[:count]


IDS = st.lists(st.sampled_from((0, 1, 255, 256, 1 << 31, (1 << 32) - 1)), max_size=40)


@settings(max_examples=examples(200))
@given(IDS, IDS, st.lists(st.integers(0, 700), max_size=1).map(sum))
@example([0] + [1] * 64, [255] + [1] * 64, 65)
def test_common_tokens_counts_equal_leading_ids(left: list[int], right: list[int], alike: int) -> None:
    left, right = [7] * alike + left, [7] * alike + right
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_tokens(ids_of(left), ids_of(right)) == expected


def test_token_keys_agree_as_far_as_whole_chunks_do() -> None:
    left, right = ids_of(range(1000)), ids_of([*range(600), *range(400)])
    a, b = token_keys(b"s", left), token_keys(b"s", right)
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])
    assert not set(a) & set(token_keys(b"t", left))
