"""A worker reuses what another one read, with the tokens and hashes of a reader that reuses nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import random
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.block_hash import SGLANG, HashScheme, block_hashes
from kvatlas.router.prompts import shared_prompts
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_prompts import CHARS_MIN
from kvatlas.router.prompts.shared_records import SharedRecords, make_memory
from tests.support.prompts import cases
from tests.support.prompts.readers import (
    byte_level_tokenizer,
    chat,
    local_reader,
    metaspace_tokenizer,
    model_dir,
    plain_tokenizer,
    read_exact,
    reader,
    request,
    say,
)

SCHEMES = (HashScheme(), HashScheme(algo=SGLANG, hash_block_size=64))
OTHER_SCHEMES = (
    HashScheme(algo="sha256_cbor", hash_block_size=32),
    HashScheme(algo="xxhash", hash_block_size=8, lookahead=2, tagged=False),
    HashScheme(algo="learned"),
)
CHUNKS = ["Hello", " world", "\n", "é", "日本", "12345", "<think>", "  ", "{}", " The router asks", "😀"]
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def prompts_are_written_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prompts, "DELAY_S", 1e6)


def read_one(worker: PromptReader, body: Any, path: str = "/v1/chat/completions") -> Prompt:
    return read_exact(worker, body, path, model=body.get("model", "m"))


class Team:
    """Workers that share a memory, and one reader that is alone."""

    def __init__(self, folder: Path, *, count: int = 2, size: int = 16 << 20, **model: Any) -> None:
        made = make_memory(size)
        assert made is not None
        self.memory: mmap.mmap = made
        self.count = count
        self.model = {"m": ModelPrompts(tokenizer_dir=str(folder), **model)}
        self.workers = [self.worker(slot) for slot in range(count)]

    def worker(self, slot: int) -> PromptReader:
        """A new process in this slot."""
        return reader(self.model, records=lambda stats: SharedRecords(self.memory, slot, self.count, stats))

    def read(
        self,
        slot: int,
        body: Any,
        path: str = "/v1/chat/completions",
        schemes: tuple[HashScheme, ...] = SCHEMES,
    ) -> Prompt:
        """A worker reads a prompt, hashes and shares it."""
        worker = self.workers[slot]
        prompt = read_one(worker, body, path)
        for scheme in schemes:
            prompt.hashes(scheme)
        assert worker._cache.shared is not None
        worker._cache.shared.write()
        return prompt

    def stats(self, name: str) -> list[int]:
        """A counter of each worker."""
        return [getattr(worker.stats, name) for worker in self.workers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("m"), "thinking_tools")


def words(rng: random.Random, chars: int) -> str:
    text = ""
    while len(text) < chars:
        text += rng.choice(CHUNKS)
    return text


def assert_is(prompt: Prompt, expected: Prompt, schemes: tuple[HashScheme, ...] = SCHEMES) -> None:
    assert prompt.token_ids == expected.token_ids
    for scheme in schemes:
        assert prompt.hashes(scheme) == block_hashes(expected.token_ids, scheme, expected.extras)


@pytest.mark.parametrize(
    "fields", [{}, {"tools": cases.TOOLS}, {"cache_salt": "x"}], ids=["", "tools", "salt"]
)
@pytest.mark.parametrize("size", [500, 20_000])
def test_turns_that_alternate_between_workers_equal_those_of_one(
    folder: Path, fields: dict[str, Any], size: int
) -> None:
    rng, team, alone = random.Random(size), Team(folder, count=3), local_reader(folder)
    messages = [say("system", words(rng, size))]
    for turn in range(9):
        messages.append(say("user", words(rng, size // 10)))
        body = chat(*messages, **fields)
        assert_is(team.read(turn % 3, body), read_one(alone, body))
        messages.append(say("assistant", words(rng, size // 10)))
    if size > CHARS_MIN:
        # Each worker reads its first turn of the conversation from the others.
        assert team.stats("shared_hits")[0] >= 1
        assert min(team.stats("shared_hits")[1:]) >= 2
        assert sum(team.stats("tokens_new")) < 1.5 * alone.stats.tokens_new


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize("chars", [CHARS_MIN - 1, 8_000, 100_000])
def test_completions_of_a_growing_text(tmp_path: Path, tokenizer: Any, chars: int) -> None:
    team = Team(model_dir(tmp_path, None, tokenizer=tokenizer()))
    alone = local_reader(tmp_path)
    text = words(random.Random(chars), chars)
    text = text[: chars - 2_000] + " the router asks" * 200
    for number, end in enumerate((chars - 300, chars - 200, chars)):
        body = {"prompt": text[:end]}
        assert_is(team.read(number % 2, body, COMPLETIONS), read_one(alone, body, COMPLETIONS))
    by_words = tokenizer is byte_level_tokenizer  # the other one's texts have no cuts
    assert team.stats("shared_hits")[1] == int(chars > CHARS_MIN and by_words)
    assert team.stats("shared_written") == [int(chars > CHARS_MIN and by_words), 0]


@pytest.mark.parametrize("num_tokens", [900, 5_000])
def test_prompts_of_ids_that_grow_and_branch(folder: Path, num_tokens: int) -> None:
    rng, team, alone = random.Random(15), Team(folder), local_reader(folder)
    ids = [rng.randrange(500) for _ in range(num_tokens)]
    for number, end in enumerate((num_tokens, num_tokens + 50, num_tokens - 600, num_tokens + 90)):
        body = {"prompt": [*ids[:end], *[1] * (end - num_tokens), number]}
        assert_is(team.read(number % 2, body, COMPLETIONS), read_one(alone, body, COMPLETIONS))
    is_long = num_tokens > 1024
    assert team.stats("shared_hits") == [0, int(is_long)]
    assert (team.stats("blocks_hashed")[1] < num_tokens // 16) == is_long
    salted = {"prompt": ids, "cache_salt": "x"}
    assert_is(team.read(0, salted, COMPLETIONS), read_one(alone, salted, COMPLETIONS))
    assert team.stats("shared_hits")[0] == 0


def test_a_next_turn_at_the_other_worker_tokenizes_and_hashes_only_what_is_new(folder: Path) -> None:
    team, rng = Team(folder), random.Random(1)
    messages = [say("system", words(rng, 20_000)), say("user", "Hi."), say("assistant", words(rng, 5_000))]
    messages += [say("user", "And?")]
    first = team.read(0, chat(*messages))
    after = team.read(1, chat(*messages, say("assistant", "Yes."), say("user", "And now?")))
    assert len(after.token_ids) > len(first.token_ids) > 1000
    assert team.stats("tokens_new")[1] < 100
    assert team.stats("blocks_hashed")[1] < 10 * len(SCHEMES)
    assert team.stats("shared_hits") == [0, 1]
    assert team.stats("shared_misses") == [1, 0]
    assert team.stats("shared_written") == [1, 0]  # too little is new


def test_hashes_of_every_scheme_are_shared(folder: Path) -> None:
    team, schemes = Team(folder, lora_paths={"a": "/a"}), (*SCHEMES, *OTHER_SCHEMES)
    body = chat(say("user", words(random.Random(13), 10_000)), cache_salt="x")
    body["model"] = "a"
    expected = read_one(local_reader(folder, lora_paths={"a": "/a"}), body)
    assert expected.extras.lora_path == "/a"
    for slot in range(2):
        assert_is(team.read(slot, body, schemes=schemes), expected, schemes)
    assert team.stats("blocks_hashed")[1] < 20 * len(schemes) < team.stats("blocks_hashed")[0]


def test_another_question_after_the_same_document_is_found(folder: Path) -> None:
    team, rng = Team(folder), random.Random(2)
    document, questions = say("system", words(rng, 30_000)), [words(rng, size) for size in (10, 900, 9_000)]
    for number, question in enumerate(questions):
        body = chat(document, say("user", question))
        assert_is(team.read(number % 2, body), read_one(local_reader(folder), body))
    assert team.stats("shared_hits")[1] == 1
    branch = chat(document, say("user", words(rng, 15_000)))
    team.workers[0] = team.worker(0)  # a successor knows nothing, and finds it
    assert_is(team.read(0, branch), read_one(local_reader(folder), branch))
    assert team.stats("shared_hits")[0] == 1


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "a"}, {"cache_salt": "b"}, {"add_special_tokens": True}],
    ids=["salt", "other salt", "special tokens"],
)
def test_prompts_of_another_scope_are_not_reused(tmp_path: Path, other: dict[str, Any]) -> None:
    team = Team(model_dir(tmp_path, "thinking_tools"))
    text = "<|im_start|>" + words(random.Random(3), 20_000) + "<|im_start|>" + words(random.Random(3), 1_000)
    bodies: list[dict[str, Any]] = [
        {"prompt": text, "cache_salt": "b", "add_special_tokens": False},
        {"prompt": text, "add_special_tokens": False, **other},
    ]
    if other == {"cache_salt": "b"}:
        bodies[0].pop("cache_salt")
    for slot, body in enumerate(bodies):
        expected = read_one(local_reader(tmp_path), body, COMPLETIONS)
        assert_is(team.read(slot, body, COMPLETIONS), expected)
    assert team.stats("shared_hits") == [0, 0]


def test_colliding_keys_do_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = lambda scope, data: [7] * (len(data) // 1024 + 1)  # noqa: E731
    monkeypatch.setattr(shared_prompts, "text_keys", keys)
    monkeypatch.setattr("kvatlas.router.prompts.prompt_cache.token_keys", keys)
    rng, team, alone = random.Random(17), Team(folder, lora_paths={"a": "/a"}), local_reader(folder)
    alone_adapter = local_reader(folder, lora_paths={"a": "/a"})
    texts = [words(random.Random(seed), 6_000) for seed in range(2)]
    fields: list[dict[str, Any]] = [{}, {"cache_salt": "x"}, {"model": "a"}, {"tools": cases.TOOLS}]
    for _ in range(30):
        more, text, slot = rng.choice(fields), rng.choice(texts), rng.randrange(2)
        team.workers[slot] = team.worker(slot)
        if rng.random() < 0.3 and "tools" not in more:
            body, path = {"prompt": [ord(char) % 500 for char in text], **more}, COMPLETIONS
        else:
            body, path = chat(say("user", text + rng.choice(CHUNKS)), **more), "/v1/chat/completions"
        one = alone_adapter if "model" in more else alone
        assert_is(team.read(slot, body, path), read_one(one, body, path))


def test_another_tokenizer_of_the_same_name_is_not_reused(tmp_path: Path) -> None:
    """A worker has not loaded yet what the other one has."""
    team = Team(model_dir(tmp_path / "a", "thinking_tools"))
    body = chat(say("user", words(random.Random(4), 20_000)))
    team.read(0, body)
    model_dir(tmp_path / "a", "thinking_tools", tokenizer=plain_tokenizer())
    team.workers[1] = team.worker(1)
    assert_is(team.read(1, body), read_one(local_reader(tmp_path / "a"), body))
    assert team.stats("shared_hits") == [0, 0]
    model_dir(tmp_path / "a", "thinking_tools", additional_special_tokens=["asks"])
    team.workers[1] = team.worker(1)
    assert_is(team.read(1, body), read_one(local_reader(tmp_path / "a"), body))
    assert team.stats("shared_hits") == [0, 0]


def test_another_template_reuses_what_is_the_same_text(tmp_path: Path) -> None:
    team = Team(model_dir(tmp_path, "thinking_tools"))
    messages = [say("system", words(random.Random(5), 20_000)), say("user", "Hi.")]
    team.read(0, chat(*messages))
    team.workers[1].close()
    template = (tmp_path / "tokenizer_config.json").read_text().replace("assistant", "helper")
    (tmp_path / "tokenizer_config.json").write_text(template)
    team.workers[1] = team.worker(1)
    assert_is(team.read(1, chat(*messages)), read_one(local_reader(tmp_path), chat(*messages)))


def test_any_turns_at_any_worker_in_a_memory_that_is_too_small(folder: Path) -> None:
    rng = random.Random(6)
    team, alone = Team(folder, count=2, size=400_000), local_reader(folder)
    chats = [[say("system", words(rng, 4_500))] for _ in range(6)]
    for _ in range(50):
        messages = rng.choice(chats)
        if rng.random() < 0.2:
            del messages[rng.randint(1, len(messages)) :]
        if rng.random() < 0.05:
            slot = rng.randrange(2)
            team.workers[slot] = team.worker(slot)
        messages += [say("user", words(rng, rng.randint(1, 900))), say("assistant", words(rng, 300))]
        body = chat(*messages[:-1])
        assert_is(team.read(rng.randrange(2), body), read_one(alone, body))
    assert sum(team.stats("shared_overwritten")) > 0
    assert sum(team.stats("shared_hits")) > 0


@pytest.mark.parametrize("chars", [6_000, 200_000])
def test_a_prompt_that_is_too_large_for_the_memory_is_refused(folder: Path, chars: int) -> None:
    team = Team(folder, size=1 << 20)
    body = chat(say("user", words(random.Random(7), chars)))
    for slot in range(2):
        assert_is(team.read(slot, body), read_one(local_reader(folder), body))
    is_large = chars > 100_000
    assert team.stats("shared_refused") == [int(is_large), int(is_large)]
    assert team.stats("shared_hits") == [0, int(not is_large)]


def test_a_long_conversation_is_written_a_few_times(folder: Path) -> None:
    team, rng = Team(folder), random.Random(8)
    messages = [say("system", words(rng, 4_000))]
    for _ in range(30):
        messages += [say("user", words(rng, 500))]
        team.read(0, chat(*messages))
        messages += [say("assistant", words(rng, 500))]
    written = team.stats("shared_written")[0]
    assert 10 < written < 25


def test_hashes_that_were_missing_are_written_by_who_made_them(folder: Path) -> None:
    team = Team(folder)
    body = chat(say("user", words(random.Random(9), 20_000)))
    shared = team.workers[0]._cache.shared
    assert shared is not None
    read_one(team.workers[0], body)
    shared.write()  # without its hashes
    team.read(1, body)
    assert team.stats("tokens_new")[1] < 200
    assert team.stats("shared_written") == [1, 1]
    team.workers[0] = team.worker(0)
    team.read(0, body)
    assert team.stats("blocks_hashed")[0] < 10 * len(SCHEMES)


async def test_a_prompt_is_written_after_a_pause_without_any_further_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prompts, "DELAY_S", 0.1)
    team = Team(folder)
    body = chat(say("user", words(random.Random(10), 20_000)))
    await team.workers[0].read(request(body))
    assert team.stats("shared_written") == [0, 0]
    await asyncio.sleep(0.2)
    assert team.stats("shared_written") == [1, 0]


async def test_many_prompts_are_written_in_short_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prompts, "DELAY_S", 0.1)
    monkeypatch.setattr(shared_prompts, "_STEP_TOKENS", 10_000)
    team, rng = Team(folder), random.Random(16)
    bodies = [chat(say("user", f"{number} {words(rng, 8_000)}")) for number in range(12)]
    tokens = [(await team.workers[0].read(request(body))).num_tokens for body in bodies]
    await asyncio.sleep(0.1)
    steps = []
    for _ in bodies:
        steps.append(team.stats("shared_written")[0])
        await asyncio.sleep(shared_prompts._STEP_S)
    assert steps[-1] == team.stats("shared_written")[0] == 12
    assert max(b - a for a, b in itertools.pairwise([0, *steps])) <= 1 + 10_000 // min(tokens) < 12


def test_prompts_that_wait_are_bounded(folder: Path) -> None:
    team, rng = Team(folder, size=64 << 20), random.Random(11)
    head = words(rng, 5_000)

    async def read_many() -> None:
        for number in range(300):
            await team.workers[0].read(request(chat(say("user", f"{number} {head}"))))

    asyncio.run(read_many())
    shared = team.workers[0]._cache.shared
    assert shared is not None
    shared.write()
    assert team.stats("shared_written")[0] == 256


READER = """
import asyncio, json, mmap, sys
from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts import shared_prompts
from kvatlas.router.prompts.reader import ModelPrompts, PromptReader, PromptSettings
from kvatlas.router.prompts.shared_records import SharedRecords

async def main(folder, file, slot):
    memory = mmap.mmap(int(file), 0)
    reader = PromptReader(
        {"m": ModelPrompts(tokenizer_dir=folder)}, PromptSettings(), None,
        records=lambda stats: SharedRecords(memory, int(slot), 2, stats),
    )
    for line in sys.stdin.buffer:
        request = InboundRequest("POST", "/v1/chat/completions", b"", [], line, "m")
        prompt = await reader.read(request)
        hashes = list(prompt.hashes(HashScheme()))
        reader._cache.shared.write()
        stats = [reader.stats.tokens_new, reader.stats.shared_hits]
        print(json.dumps([list(prompt.token_ids), hashes, stats]), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Process:
    """A worker in a process of its own."""

    def __init__(self, folder: Path, file: int, slot: int) -> None:
        words = [sys.executable, "-c", READER, str(folder), str(file), str(slot)]
        self.child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file])

    def read(self, body: Any) -> Any:
        """Token ids, hashes, and new tokens and hits so far."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(body).encode() + b"\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def close(self) -> None:
        """Kill it, at any point."""
        self.child.kill()
        self.child.communicate()


@pytest.mark.real
@pytest.mark.process
def test_turns_that_alternate_between_processes_of_which_one_is_killed(folder: Path) -> None:
    rng, alone, file = random.Random(14), local_reader(folder), os.memfd_create("test")
    made = make_memory(8 << 20)
    assert made is not None
    os.write(file, made[:])
    messages = [say("system", words(rng, 20_000))]
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Process(folder, file, slot))) for slot in range(2)]
        hits = []
        for turn in range(6):
            if turn == 3:  # with all that it has read
                workers[turn % 2].close()
                workers[turn % 2] = stack.enter_context(closing(Process(folder, file, turn % 2)))
            messages.append(say("user", words(rng, 500)))
            expected = read_one(alone, chat(*messages))
            ids, hashes, stats = workers[turn % 2].read(chat(*messages))
            assert ids == list(expected.token_ids)
            assert hashes == block_hashes(expected.token_ids, HashScheme(), expected.extras)
            hits.append(stats[1])
            messages.append(say("assistant", words(rng, 500)))
        assert hits[0] == 0
        assert hits[1] == hits[3] == 1  # by the other one, and by the successor
    os.close(file)


def test_one_process_shares_nothing(folder: Path) -> None:
    alone = local_reader(folder)
    read_one(alone, chat(say("user", words(random.Random(12), 20_000))))
    assert alone._cache.shared is None
    assert alone.stats.shared_misses == PromptStats().shared_misses == 0
