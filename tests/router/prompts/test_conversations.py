"""Reading by conversation equals reading from nothing, and what was read before stays as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import SGLANG, HashScheme, block_hashes
from kvatlas.router.prompts.bodies import decode_body
from kvatlas.router.prompts.conversation import Turn, common_tokens
from kvatlas.router.prompts.prompt_cache import PrefixCache
from kvatlas.router.prompts.reader import Prompt, PromptReader
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.truncation import ids_of
from tests.support.examples import examples
from tests.support.prompts import cases
from tests.support.prompts.readers import TEMPLATES, local_reader, model_dir, read_exact, request, say

SCHEMES = (
    HashScheme(),
    HashScheme(algo="sha256_cbor", hash_block_size=32),
    HashScheme(algo="xxhash", seed="0", hash_block_size=8, lookahead=2),
    HashScheme(algo="xxhash_cbor", seed="0", hash_block_size=3, tagged=False),
    HashScheme(algo="learned", hash_block_size=5),
    HashScheme(algo=SGLANG, hash_block_size=4),
    HashScheme(algo=SGLANG, hash_block_size=4, lookahead=1),
)
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
WORDS = "The router asks which engine holds the longest prefix of this prompt, and sends it there. "
TEXTS = st.one_of(
    st.sampled_from(["Hi", "Hi there", " ", WORDS, WORDS * 20, WORDS * 20 + "So?"]),
    st.sampled_from(["", "<|im_end|>", "<think>\nNo</think>\n\nYes", "\x1f", "日本 é"]),
    st.text(max_size=30),
)
OTHER = st.one_of(
    st.sampled_from([say("user", [{"type": "text", "text": "In parts."}]), say("user", "Named", name="n")]),
    st.sampled_from([cases.CALLED, cases.RESULT, cases.THOUGHT, cases.SYSTEM]),
)
# Mostly a text, whose role is that of its place: so that templates have written around the same roles before.
SAID = st.one_of(TEXTS, TEXTS, TEXTS, TEXTS, OTHER)
FIELDS = st.sampled_from(
    [{}] * 12
    + [
        {"tools": cases.TOOLS},
        {"cache_salt": "x"},
        {"add_generation_prompt": False},
        {"truncate_prompt_tokens": 20},
    ]
)
STEP = st.tuples(
    st.integers(0, 8),  # which of the dialogs before
    st.sampled_from([0, 0, 1, 1, 2, 3]),  # how many of its last messages are gone
    st.lists(SAID, max_size=3),
    st.one_of(st.none(), st.tuples(st.integers(0, 5), SAID, st.booleans())),  # an edit, or more of a text
    FIELDS,
    st.sampled_from(["chat"] * 8 + ["messages", "responses", "completion"]),
    st.sampled_from("mmmmma"),
    st.booleans(),  # whether it is hashed at once
)


def message(said: str | dict[str, Any], at: int) -> dict[str, Any]:
    """A text as message number ``at``."""
    return (
        say(("user", "assistant")[(at + 1) % 2] if at else "system", said) if isinstance(said, str) else said
    )


def body_of(api: str, messages: list[dict[str, Any]], fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The dialog as a request of one of the APIs."""
    salt = {name: value for name, value in fields.items() if name == "cache_salt"}
    spoken = [
        one for one in messages if one["role"] in {"user", "assistant"} and isinstance(one["content"], str)
    ]
    spoken = [{"role": one["role"], "content": one["content"]} for one in spoken]
    if api == "messages":
        return "/v1/messages", {"messages": spoken, "system": "Be brief.", "max_tokens": 9, **salt}
    if api == "responses":
        return "/v1/responses", {"input": spoken, "instructions": "Be brief.", **salt}
    if api == "completion":
        return "/v1/completions", {"prompt": "".join(one["content"] for one in spoken), **salt}
    return "/v1/chat/completions", {"messages": messages, **fields}


def read_or_why(reader: PromptReader, path: str, body: dict[str, Any], model: str) -> Prompt | str:
    """The prompt, or why it is not read here."""
    try:
        return read_exact(reader, body, path, model=model)
    except AssertionError as error:
        return str(error)[:60]
    except Exception as error:  # noqa: BLE001  # what is refused must be refused by both
        return type(error).__name__


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: model_dir(tmp_path_factory.mktemp("m"), name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(80))
@given(steps=st.lists(STEP, min_size=2, max_size=20), bytes_max=st.sampled_from((1 << 28, 40_000)))
def test_any_dialogs_with_branches(
    name: str, folders: dict[str, Path], steps: list[tuple[Any, ...]], bytes_max: int
) -> None:
    lora = {"a": "/a"}
    warm, cold = (local_reader(folders[name], lora_paths=lora) for _ in range(2))
    warm.local_model("m")._cache = PrefixCache(warm.stats, bytes_max)
    dialogs: list[list[dict[str, Any]]] = [[say("system", WORDS), say("user", "Hi")]]
    seen: list[tuple[Prompt, list[int], HashScheme]] = []
    for number, (of, gone, new, edit, fields, api, model, at_once) in enumerate(steps):
        messages = list(dialogs[of % len(dialogs)])
        del messages[max(1, len(messages) - gone) :]
        for said in new:
            messages.append(message(said, len(messages)))
        if edit is not None:
            at, said, added = edit
            at %= len(messages)
            before = messages[at]["content"] if added and isinstance(said, str) else None
            messages[at] = message(before + said if isinstance(before, str) else said, at)
        dialogs.append(messages)
        path, body = body_of(api, messages, fields)
        cold.local_model("m")._cache = PrefixCache(PromptStats(), 0)
        expected, found = read_or_why(cold, path, body, model), read_or_why(warm, path, body, model)
        if isinstance(expected, str) or isinstance(found, str):
            assert expected == found
            continue
        scheme = SCHEMES[number % len(SCHEMES)]
        ids = expected.token_ids.tolist()
        assert found.num_tokens == len(ids)
        assert found.extras == expected.extras
        if at_once:
            assert found.hashes(scheme) == block_hashes(ids, scheme, found.extras)
        seen.append((found, ids, scheme))
        warm.local_model("m")._cache.check_integrity()
    for found, ids, scheme in seen:
        assert found.token_ids.tolist() == ids
        assert found.hashes(scheme) == block_hashes(ids, scheme, found.extras)


def test_hashes_of_a_prompt_shorter_than_a_block_stay_those_of_it(folders: dict[str, Path]) -> None:
    reader = local_reader(folders["turns"])
    dialog, scheme = [say("user", "Hi")], HashScheme(hash_block_size=24)
    first = read_exact(reader, {"messages": dialog})
    assert first.hashes(scheme) == []
    longer = read_exact(reader, {"messages": [*dialog, say("assistant", WORDS), say("user", WORDS)]})
    assert longer.hashes(scheme) == block_hashes(longer.token_ids.tolist(), scheme)
    assert first.hashes(scheme) == []


COUNTED = (
    "{{ messages | length }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.last %} (now){% endif %}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize("name", [*NAMES, "counted"])
def test_each_message_is_edited_in_each_turn_of_known_layouts(name: str, folders: dict[str, Path]) -> None:
    more = {} if name in folders else {"chat_template": COUNTED}
    warm, cold = (local_reader(folders.get(name, folders["chatml"]), **more) for _ in range(2))
    texts = ["Be brief.", "Hi", "<think>\nNo\n</think>\n\nYes", WORDS[:13], "So", WORDS * 20 + "Why", "It is"]
    dialog = [message(text, at) for at, text in enumerate(texts)]
    for length in range(2, len(dialog) + 1):
        turns = [dialog[:length]]
        for at in range(length):
            others = f"{texts[at]}{texts[3][at:]}{length}", texts[at][:-2], f"Else {length}", texts[2]
            turns += [[*dialog[:at], message(one, at), *dialog[at + 1 : length]] for one in others]
            turns += [dialog[:length]] * (at % 2)
        for messages in turns:
            body = {"messages": messages}
            cold.local_model("m")._cache = PrefixCache(PromptStats(), 0)
            expected, found = (read_or_why(one, "/v1/chat/completions", body, "m") for one in (cold, warm))
            if isinstance(expected, str) or isinstance(found, str):
                assert expected == found
                continue
            assert found.hashes(SCHEMES[0]) == block_hashes(expected.token_ids, SCHEMES[0])
            assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("words", [1, 10, 3_000, pytest.param(50_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("template", ["chatml", "thinking_tools"])
def test_dialogs_of_any_length_grow_and_branch(tmp_path: Path, template: str, words: int) -> None:
    warm, cold = (local_reader(model_dir(tmp_path / "m", template)) for _ in range(2))
    dialog = [say("system", "Be brief."), say("user", (WORDS * words)[: 5 * words])]
    for turn in range(3):
        for question in (f"And {turn}?", f"Or {turn}, " + WORDS * 3):
            body = {"messages": [*dialog, say("user", question)]}
            cold.local_model("m")._cache = PrefixCache(PromptStats(), 0)
            expected, tokens = read_exact(cold, body).token_ids, warm.stats.tokens_new
            found = read_exact(warm, body)
            assert found.hashes(SCHEMES[0]) == block_hashes(expected, SCHEMES[0])
            assert found.token_ids == expected
            assert turn == 0 or warm.stats.tokens_new - tokens < 700, "only what is new is tokenized"
        dialog += [say("user", question), say("assistant", "Because.")]


CALLS_MAX = 56
"""Python calls of the router that read and hash a next turn, of any length."""


@pytest.mark.parametrize("words", [10, 3_000])
@pytest.mark.parametrize("grows", [True, False])
def test_a_next_turn_takes_a_bounded_number_of_calls(
    folders: dict[str, Path], words: int, grows: bool
) -> None:
    reader, found = local_reader(folders["chatml"]), 0

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and "/router/prompts/" in frame.f_code.co_filename

    for system in ("Be brief.", "Be kind."):  # the first dialog teaches the layouts
        dialog = [say("system", system), say("user", (WORDS * words)[: 5 * words])]
        for turn in range(4):
            asked = request({"messages": [*dialog, say("assistant", "So?"), say("user", f"Why, {turn}?")]})
            asked.prompt = decode_body(asked.path, asked.body)
            found, reading = 0, reader.read(asked)
            sys.setprofile(enter)
            try:
                reading.send(None)
            except StopIteration as end:
                end.value.hashes(SCHEMES[0])
            finally:
                sys.setprofile(None)
            if grows:
                dialog += [say("assistant", "So?"), say("user", f"Why, {turn}?")]
    assert not grows or len(reader._cache) == 2, "one for each dialog"
    assert found <= CALLS_MAX


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_turns_that_share_a_beginning_keep_their_ids(steps: list[tuple[int, int, int]]) -> None:
    """Ids are an array that several turns share, each with an end of its own."""
    turns = [Turn(ids_of(range(20)), None)]
    whole = [list(range(20))]
    for number, (one, most, new) in enumerate(steps):
        of = one % len(turns)
        shared = min(most, len(whole[of]))
        more = [100 * number + at for at in range(new)]
        turns.append(Turn(ids_of(more), None, (), turns[of].beginning(shared), shared))
        whole.append(whole[of][:shared] + more)
        assert turns[of].common(turns[-1]) == common_tokens(ids_of(whole[of]), ids_of(whole[-1]))
        if number % 5 == 4:
            assert turns[of].ids.tolist() == whole[of]
    for turn, ids in zip(turns, whole, strict=True):
        assert turn.num_tokens == len(ids)
        for start in (0, len(ids) // 2, turn.at, len(ids)):
            assert turn.end(start).tolist() == ids[start:]
        assert turn.ids.tolist() == ids
