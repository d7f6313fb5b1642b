"""Cost of an event of a stream that may go on from another engine: taking the token id out, and keeping it.

    python -m benchmarks.kept_streams [--rounds 1000]

In process: events of vLLM's chat and completion streams pass through ``KeptStream``, which nothing of other
streams does. Best of the rounds of 64 events, in CPU time of the thread; goal: 2 us.
"""

from __future__ import annotations

import argparse
import time

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.proxy.continuation_plan import ContinuationPlan, plan_of
from kvatlas.router.proxy.kept_stream import KeptStream

EVENTS = 64
_HEAD = b'data: {"id":"chatcmpl-8f1c0d2e4a5b","object":"%b","created":1790000000,"model":"Qwen/Qwen3-8B",'
_CHAT = (
    _HEAD
    % b"chat.completion.chunk"
    + b'"choices":[{"index":0,"delta":{"content":" w%d"},"logprobs":null,"finish_reason":null,'
    b'"token_ids":[%d]}]'
)
_COMPLETION = (
    _HEAD
    % b"text_completion"
    + b'"choices":[{"index":0,"text":" w%d","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[%d]%b}]'
)
STREAMS = {
    "chat, 0.32": (CHAT, _CHAT + b"}\n\n"),
    "chat, 0.33": (CHAT, _CHAT + b',"kv_transfer_params":null}\n\n'),
    "completion, 0.32": (COMPLETION, _COMPLETION.replace(b"%b", b"") + b',"usage":null}\n\n'),
    "completion, 0.33": (
        COMPLETION,
        _COMPLETION.replace(b"%b", b',"weight_versions":null')
        + b',"usage":null,"kv_transfer_params":null}\n\n',
    ),
}
_OPENING = (
    _HEAD
    % b"chat.completion.chunk"
    + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}],"prompt_token_ids":[1,2,3]}\n\n'
)


def stream(path: str) -> KeptStream:
    """One that has begun."""
    plan = plan_of(path, b'{"model":"m","stream":true,"max_tokens":1000}')
    assert isinstance(plan, ContinuationPlan)
    kept = KeptStream(plan)
    first = _COMPLETION.replace(b"%b", b"") % (0, 9) + b"}\n\n"
    kept.feed(
        _OPENING if path == CHAT else first.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":[1,2]')
    )
    return kept


def best_us(path: str, event: bytes, rounds: int) -> float:
    """Microseconds of CPU per event. Raises ``RuntimeError`` where an id is not taken out."""
    kept, found = stream(path), float("inf")
    for number in range(rounds):
        events = [event % (at, 1000 * number + at) for at in range(EVENTS)]
        begun = time.thread_time_ns()
        passed = [kept.feed(one) for one in events]
        found = min(found, (time.thread_time_ns() - begun) / 1000 / EVENTS)
        if any(b'"token_ids":null' not in one for one in passed):
            raise RuntimeError(f"{path}: an event keeps its ids")
    if len(kept.ids) < rounds * EVENTS:
        raise RuntimeError(f"{path}: ids are missing")
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    for name, (path, event) in STREAMS.items():
        print(f"{name}: {best_us(path, event, rounds):.2f} us per event")


if __name__ == "__main__":
    main()
