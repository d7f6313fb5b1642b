"""Every prediction is what the engine then reports: one request at a time, over every kind of model.

Two engines with small pools, so that blocks are evicted all the time; conversations that grow and branch,
plain completions, token ids, salts, streams with and without usage.
"""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockRemoved
from kvatlas.publisher.simulator.server import SimulatedEngine
from tests.support.examples import fewer, some
from tests.support.waiting import run
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

BLOCKS = {"full": 90, "gptoss-like": 150, "gemma3-like": 480, "mamba-hybrid": 160}
REQUESTS = fewer(110)
WORDS = TEXT.lower().replace(".", " and of to in with its").split()


class Load:
    """Makes request bodies; conversations remember the answers they got."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.systems = [self.text(90) for _ in range(3)]
        self.stems = [self.text(60) for _ in range(2)]
        self.chats: list[list[dict[str, str]]] = []

    def text(self, words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=words))

    def chat(self) -> list[dict[str, str]]:
        """The next turn of a conversation: a new one, one that goes on, or one taken up earlier."""
        rng = self.rng
        if not self.chats or rng.random() < 0.25:
            chat = [{"role": "system", "content": rng.choice(self.systems)}]
        else:
            chat = rng.choice(self.chats)
            if len(chat) > 3 and rng.random() < 0.35:
                chat = chat[: rng.randrange(1, len(chat), 2)]  # branch off after an answer
            if len(chat) > 9:
                chat = chat[:3]
        return [*chat, {"role": "user", "content": self.text(rng.randint(5, 60))}]

    def prompt(self) -> str | list[int]:
        """A plain prompt that shares its start with others."""
        rng = self.rng
        if rng.random() < 0.4:
            return [100 + i % 150 for i in range(rng.randint(1, 300))]
        return rng.choice(self.stems) + " " + self.text(rng.randint(1, 80))


async def send(rig: Rig, load: Load) -> tuple[int, int | None]:
    """One request by the ``openai`` client: predicted hit, and reported one (None: not asked for)."""
    rng = load.rng
    extra: dict[str, Any] = {"ignore_eos": True}
    if rng.random() < 0.15:
        extra["cache_salt"] = rng.choice(["tenant-1", "tenant-2"])
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(1, 24), "extra_body": extra}
    mode = rng.choice(["whole", "stream", "usage"])
    if mode != "whole":
        fields["stream"] = True
    if mode == "usage":
        fields["stream_options"] = {"include_usage": True}
    chat = load.chat() if rng.random() < 0.75 else None
    if chat is not None:
        raw = await rig.api.chat.completions.with_raw_response.create(messages=chat, **fields)
    else:
        raw = await rig.api.completions.with_raw_response.create(prompt=load.prompt(), **fields)
    predicted = int(raw.headers["x-kvatlas-hit-tokens"])
    if mode == "whole":
        answers: list[Any] = [raw.parse()]
        usage = raw.parse().usage
    else:
        answers = [chunk async for chunk in cast(Any, raw.parse())]
        usage = answers[-1].usage
    if chat is not None:
        pieces = [c.message if mode == "whole" else c.delta for a in answers for c in a.choices]
        text = "".join(piece.content or "" for piece in pieces)
        load.chats.append([*chat, {"role": "assistant", "content": text}])
    return predicted, None if mode == "stream" else usage.prompt_tokens_details.cached_tokens


def hits(engines: list[SimulatedEngine]) -> int:
    return sum(engine.scheduler.stats.prefix_cache_hits for engine in engines)


def evicted_blocks(engine: SimulatedEngine) -> int:
    batches = [decode_batch(payload) for _, payload in engine.publisher._ring]
    events = [event for batch in batches for event in batch.events]
    return sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))


async def compare(preset: str, changes: dict[str, Any], requests: int = REQUESTS) -> None:
    settings = {"groups": preset, "num_blocks": BLOCKS[preset], "max_num_batched_tokens": 256, **changes}
    async with running(settings, settings) as engines, routing(configure(*engines)) as rig:
        load = Load(seed=11)
        wrong: list[tuple[int, int, int, int | None]] = []
        total = reported_count = 0
        for index in range(requests):
            before = hits(engines)
            predicted, reported = await send(rig, load)
            truth = hits(engines) - before
            total += truth
            reported_count += reported is not None
            if predicted != truth or (reported is not None and reported != truth):
                wrong.append((index, predicted, truth, reported))
            await rig.caught_up(*engines)
        assert wrong == []
        assert rig.outcomes("exact") == reported_count
        assert rig.outcomes("unreported") == requests - reported_count
        assert rig.router.reader.stats.local == requests
        assert rig.router.reader.stats.engine_calls == 0  # a local tokenizer: no engine is asked
        assert total > 1000  # else the load proves nothing
        assert sum(map(evicted_blocks, engines)) > 50
        rig.check_books()


def bytes_too(preset: str) -> Any:
    """How hashes are written has nothing to do with the kind of model: one kind is enough at each change,
    which then need not be tried with integers as well."""
    return pytest.param(
        preset, False, marks=[] if preset == "full" else pytest.mark.long, id=f"{preset}-bytes"
    )


def integers(preset: str) -> Any:
    return pytest.param(preset, True, marks=pytest.mark.long if preset == "full" else [], id=f"{preset}-int")


@pytest.mark.parametrize(
    ("preset", "int_hashes"),
    [*map(integers, BLOCKS), *map(bytes_too, BLOCKS)],
)
def test_every_prediction_is_what_the_engine_reports(preset: str, int_hashes: bool) -> None:
    run(compare(preset, {"int_hashes": int_hashes}))


@pytest.mark.parametrize(
    "changes",
    some(
        [
            {"hash_algo": "sha256_cbor"},
            {"retention_interval": 64},
            {"block_size": 32, "num_blocks": 75},
            {"retention_interval": None},
        ],
        2,
    ),
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_other_engines_are_predicted_as_well(changes: dict[str, Any]) -> None:
    run(compare("gptoss-like", changes, 60))


@pytest.mark.parametrize("ranks", [2, 4])
def test_decode_context_parallelism_is_predicted_from_the_first_request(ranks: int) -> None:
    run(compare("mamba-hybrid", {"decode_context_parallel_size": ranks, "num_blocks": 130}, 60))


async def test_prompts_with_developer_messages_are_the_engines_own() -> None:
    """A mismatch here would be an error of the first ``kvatlas doctor --router``."""
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        for chat in (
            [("developer", TEXT), ("user", "Hello")],
            [("system", TEXT), ("user", "Hello"), ("developer", "Be brief."), ("user", TEXT)],
        ):
            messages = [{"role": role, "content": text} for role, text in chat]
            await rig.chat("", messages=messages)
            await rig.caught_up(engine)
            await rig.chat("", messages=[*messages, {"role": "user", "content": TEXT}])
            await rig.caught_up(engine)
        assert rig.outcomes("exact") == 4
        page = (await rig.ask("GET", "/metrics"))[1]
        lines = [line for line in page.splitlines() if line.startswith("kvatlas_prompt_mismatches_total")]
        assert [line for line in lines if not line.endswith(" 0.0")] == []
