"""Runs inside vLLM's environment: vLLM's own ``ZmqEventPublisher``, told what to do by JSON lines on stdin.

Each line is answered by one JSON line. Commands: ``open`` (keyword arguments of the publisher), ``publish``
(a list of ``[ts, [event, ...]]``), ``restart`` (a new publisher on the same endpoints), ``close``.
Hashes given as ``"hex:..."`` become bytes.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import zmq
from vllm.distributed import kv_events


def hashed(value: Any) -> Any:
    return bytes.fromhex(value[4:]) if isinstance(value, str) and value.startswith("hex:") else value


def event(spec: dict[str, Any]) -> Any:
    fields = {key: value for key, value in spec.items() if key != "type"}
    for key in ("block_hashes", "parent_block_hash"):
        if isinstance(fields.get(key), list):
            fields[key] = [hashed(value) for value in fields[key]]
        elif key in fields:
            fields[key] = hashed(fields[key])
    return getattr(kv_events, spec["type"])(**fields)


def open_publisher(arguments: dict[str, Any]) -> Any:
    """Retried: the port of a publisher closed just now may be taken for a moment."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return kv_events.ZmqEventPublisher(**arguments)
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    publisher: Any = None
    arguments: dict[str, Any] = {}
    for line in sys.stdin:
        command, argument = json.loads(line)
        answer: Any = None
        if command == "open":
            arguments = argument
            publisher = open_publisher(arguments)
            config = publisher.get_publisher_config()
            answer = [config.endpoint, config.replay_endpoint]
        elif command == "publish":
            for ts, events in argument:
                publisher.publish(kv_events.KVEventBatch(ts=ts, events=[event(spec) for spec in events]))
        elif command == "restart":
            publisher.shutdown()
            publisher = open_publisher(arguments)
        elif command == "close":
            publisher.shutdown()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
