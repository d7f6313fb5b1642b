"""Each command of README and docs, typed as written on a machine of its own, succeeds.

That is: every command in a block of shell. Two engines, Redis and a router are there where pages say that
these are; ``NOT_TYPED`` lists what cannot run here, with the reason. docs/first-hour.md and
docs/kubernetes.md have tests of their own, which begin with an installed wheel.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR, EngineSettings
from tests.support.paths import DATA, ROOT
from tests.support.reader import MODEL, Block, Reader, blocks
from tests.support.redis_servers import any_program

pytestmark = [
    pytest.mark.real,
    pytest.mark.process,
    pytest.mark.long,
]  # its subject is commands, in processes

NOT_TYPED = {
    r"\bmake |benchmarks/|tests\.world": "a target or program of the checkout",
    r"^docker |^helm |^kubectl ": "needs Docker or a cluster; tests/charts does as they would",
    r"^ACL SETUSER": "a command of Redis; tests/router/replication has a fleet with these rights",
    r"^duckdb ": "needs DuckDB",
    r"^hf download|/bin/pip install": "needs the network",
    r"sglang\.launch_server": "needs SGLang; make test-sglang",
    r"kv-transfer-config|scheduling-policy": "needs vLLM's own connectors and scheduler; make test-vllm",
    r"top .*--interval": "needs a terminal; tests/router/tools",
    r"http://GATEWAY": "needs Envoy; make test-envoy",
}
REPLACED = {"/models/my-model": str(DEMO_TOKENIZER_DIR), " DIR": f" {DEMO_TOKENIZER_DIR}", "MODEL": MODEL}
"""Placeholders, and values for them."""
SHORTER = {r"^kvatlas simulate (chat|agents)": " --requests 150", r"^kvatlas advise": " --requests 50"}
"""Options for commands that take minutes, which their pages name for that."""
ENDLESS = re.compile(r"^(kvatlas (serve|epp|engine)|vllm serve)\b")
"""Commands that run until they are stopped."""
BEGUN = "listening|engine_ready|endpoint picker"
"""Words of their logs then."""
ENGINES = ("10.0.0.11", "10.0.0.12")
REDIS = "10.0.0.5"
NAMES = {"host": ENGINES[0], "engine": ENGINES[0], "other": ENGINES[1]}
OF_BOTH = " ".join(f"--engine http://{one}:8000" for one in ENGINES)
SERVE = f"kvatlas serve {OF_BOTH} --set usage.path=usage.jsonl"
READY = "curl -sf --retry 600 --retry-all-errors --retry-delay 1 localhost:8000/ready"
CHAT = "curl -sf localhost:8000/v1/chat/completions -H content-type:application/json -d @stream.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WALKED = {"first-hour.md", "kubernetes.md"}


def commands(page: Path) -> Iterator[Block]:
    """Commands of a page's blocks of shell, one by one; blocks without a language count too."""
    for block in blocks(page, "sh", "console", ""):
        command = ""
        for line in block.text.splitlines():
            command += f"\n{line}" if command else line
            try:
                shlex.split(command, comments=True)
            except ValueError:
                continue  # a quotation goes on in the next line
            if command.endswith("\\"):
                continue
            prompted = command.startswith("$ ")
            if prompted or not any(one.startswith("$ ") for one in block.text.splitlines()):
                yield Block(block.heading, command.removeprefix("$ "))
            command = ""
        assert not command, f"{page.name}: {command}"


def why_not(command: str) -> str:
    """Why a command is not typed here."""
    return next((why for pattern, why in NOT_TYPED.items() if re.search(pattern, command)), "")


CASES = [
    (page, [block for block in commands(page) if not why_not(block.text)])
    for page in PAGES
    if page.name not in WALKED
]
CASES = [(page, typed) for page, typed in CASES if typed]


class Machine:
    """The reader's machine, where one thing listens on the router's ports at a time."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.running = ""
        self._key = "kva-..."

    def type(self, command: Block) -> None:
        """Type a command; what it needs is there."""
        text = command.text
        for pattern, options in SHORTER.items():
            if re.search(pattern, text):
                text = re.sub(r"(\s*#.*)?$", f"{options}\\1", text, count=1)
        for placeholder, value in REPLACED.items():
            text = text.replace(placeholder, value)
        if ENDLESS.search(text):
            self.begin(text)
            return
        if not self.running and re.search(r"(localhost|127\.0\.0\.1):[89]00[01]", text):
            self.begin(SERVE)
            self.run(READY)
        said = self.reader.run(Block(command.heading, text.replace("kva-...", self._key)))
        if found := re.search(r"kva-\w+", said):
            self._key = found[0]

    def run(self, text: str) -> None:
        self.reader.run(Block("", text))

    def begin(self, text: str) -> None:
        """Start an endless command, and wait until it has begun."""
        self.end()
        plain = re.sub(r"\s+#.*$", "", text)
        # Emptied first: a background command empties it when it gets to that, and until then the words of the
        # one before stand there.
        self.run(f": >run.log; {plain} >run.log 2>&1 & running=$!")
        self.running = text
        self.run(f"until grep -qE '{BEGUN}' run.log; do kill -0 $running || break; sleep 0.1; done")
        self.run(f"grep -E '{BEGUN}' run.log")

    def end(self) -> None:
        """Stop it."""
        if self.running:
            self.run("kill $running; wait $running || true")
            self.running = ""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """With what pages name: files of traffic, two engines, Redis."""
    folder = tmp_path_factory.mktemp("machine")
    programs = {
        "redis": f"#!/bin/sh\nexec {any_program()} --bind {REDIS} {ENGINES[0]} --protected-mode no --save "
        ' "$@"\n'
    }
    addresses = (*ENGINES, REDIS)
    with Reader(folder, Path(sys.executable), programs, addresses=addresses, names=NAMES) as reader:
        fill(reader.folder)
        engines = [
            EngineSettings(host=host, port=8000, model=MODEL, events_port=5557, replay_port=5558)
            for host in ENGINES
        ]
        run = f"python -m kvatlas.router.simulation.demo.engines '{msgspec.json.encode(engines).decode()}'"
        reader.run(Block("", f"redis >redis.log 2>&1 & tail -f /dev/null | {run} >engines.log 2>&1 &"))
        reader.run(Block("", "until grep -q http engines.log; do sleep 0.1; done"))
        machine = Machine(reader)
        machine.begin(SERVE)
        machine.run(READY)
        machine.run(f"for i in $(seq 24); do {CHAT}; done")
        machine.end()
        settle(reader.folder)
        yield machine


def settle(folder: Path) -> None:
    """Give the recorded requests times that grow with what was computed, however busy this machine was."""
    lines = [json.loads(line) for line in (folder / "usage.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        computed = 9 + 5 * number
        line |= {"computed_tokens": computed, "cached_tokens": line["prompt_tokens"] - computed}
        line |= {
            "asked_s": 0.001,
            "first_token_s": 0.011 + 1e-4 * computed,
            "duration_s": 0.2,
            "queue_s": 0.0,
        }
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    for name in ("usage.jsonl", "access.jsonl"):
        (folder / name).write_text(text)


def fill(folder: Path) -> None:
    """Files that pages name as a reader's own."""
    text = "Why does a cup of tea cool faster when I blow on it? Say which law applies. " * 4
    chat = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    for name in ("chat.json", "body.json"):
        (folder / name).write_text(json.dumps(chat))
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    (folder / "stream.json").write_text(json.dumps(chat))
    (folder / "kvatlas.toml").write_text(f'[[engines]]\nbase_url = "http://{ENGINES[0]}:8000"\n')
    (folder / "traces").mkdir()
    name = "full_attn.1.jsonl.gz"
    (folder / "traces" / name).symlink_to(DATA / "traces" / name)
    (folder / "tests/data").mkdir(parents=True)
    (folder / "tests/data/traces").symlink_to(folder / "traces")
    rows = [
        {"timestamp": 400 * n, "input_length": 530, "output_length": 20, "hash_ids": [n // 2, 100 + n]}
        for n in range(60)
    ]
    turns = [
        {"t": float(n), "in": 640 + 64 * n, "out": 20, "hash_ids": list(range(10 + n))} for n in range(4)
    ]
    (folder / "sessions").mkdir()
    for name in "ab":
        session = {"id": name, "block_size": 64, "requests": [{"type": "n", **turn} for turn in turns]}
        (folder / "sessions" / f"{name}.json").write_text(json.dumps(session))
    with gzip.open(folder / "trace.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize(("page", "typed"), CASES, ids=[page.stem for page, _ in CASES])
def test_commands_succeed(machine: Machine, page: Path, typed: list[Block]) -> None:
    try:
        for command in typed:
            machine.type(command)
    finally:
        machine.end()


def test_every_reason_is_needed() -> None:
    texts = [block.text for page in PAGES if page.name not in WALKED for block in commands(page)]
    assert [pattern for pattern in NOT_TYPED if not any(re.search(pattern, text) for text in texts)] == []
