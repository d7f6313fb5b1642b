"""Publishes the events that fake engines would, for the sessions of the load generator.

The load generator (``legs.requests``) sends S sessions whose prompts differ only in their last 64
bytes. This process computes each session's prompt as the router does, and publishes for one engine per
session the blocks of the common part. It runs until its standard input closes. Arguments: tokenizer
directory, cache layout (``layouts``), sizes of bodies in bytes with commas between, then one events port per
engine; the replay port is the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from benchmarks.layouts import LAYOUTS, events_of
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.prompts.settings import ModelPrompts, PromptSettings

BLOCK = 16
SESSIONS = 64
TAIL_BYTES = 64
SHAPES = ((False, 200), (True, 200), (True, 100))
"""(stream, max_tokens) of the load generator's scenarios."""
_WORDS = tuple("alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima".split())  # noqa: SIM905
_WORDS += ("mike", "november", "oscar", "papa")
_MASK = (1 << 64) - 1


def session_body(session: int, size: int, *, stream: bool, max_tokens: int, tail: str) -> bytes:
    """The body the load generator sends for a session, with the given last bytes."""
    state = 1234567 + session * 7919
    head = (
        f'{{"model":"fake-model","stream":{str(stream).lower()},"max_tokens":{max_tokens},'
        f'"messages":[{{"role":"system","content":"You are session {session}. '
    )
    parts, length, split = [head], len(head), False
    while length < size - TAIL_BYTES - 20:
        if not split and size / 2 < length < size - TAIL_BYTES - 200:
            parts.append('"},{"role":"user","content":"')
            length += len(parts[-1])
            split = True
        state ^= (state << 13) & _MASK
        state ^= state >> 7
        state ^= (state << 17) & _MASK
        parts.append(_WORDS[state & 15] + " ")
        length += len(parts[-1])
    return "".join([*parts, tail * TAIL_BYTES, '"}]}']).encode()


async def common_tokens(reader: PromptReader, body: bytes, other: bytes) -> list[int]:
    """Tokens two prompts have in common at their start."""
    prompts = []
    for text in (body, other):
        request = InboundRequest("POST", "/v1/chat/completions", b"", [], text, "fake-model")
        prompt = await reader.read(request)
        if not isinstance(prompt, Prompt):
            raise TypeError(f"no tokens: {prompt.reason}")
        prompts.append(list(prompt.token_ids))
    same = next((i for i, pair in enumerate(zip(*prompts, strict=False)) if pair[0] != pair[1]), 0)
    return prompts[0][: same // BLOCK * BLOCK]


async def _post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    raise OSError("no engine is asked here")


async def main() -> None:
    """Publish everything once, then wait."""
    directory, layout, sizes, *ports = sys.argv[1:]
    reader = PromptReader({"*": ModelPrompts(tokenizer_dir=directory)}, PromptSettings(), _post)
    publishers = []
    for port in map(int, ports):
        replay = f"tcp://127.0.0.1:{port + 1}"
        publishers.append(ZmqPublisher(f"tcp://127.0.0.1:{port}", replay_endpoint=replay))
        publishers[-1].start()
    for size, (stream, max_tokens), session in itertools.product(
        map(int, sizes.split(",")), SHAPES, range(SESSIONS)
    ):
        bodies = [session_body(session, size, stream=stream, max_tokens=max_tokens, tail=t) for t in "0f"]
        for events in events_of(LAYOUTS[layout], await common_tokens(reader, *bodies)):
            publishers[session % len(ports)].publish(events)
    reader.close()
    print("published", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for publisher in publishers:
        publisher.close()


if __name__ == "__main__":
    asyncio.run(main())
