"""Next turns by this checkout and by another, in turn:
``python -m benchmarks.prompts_against DIR [--api chat|messages] [--kilobytes N] [--rounds N]``.

``DIR`` is a checkout of another version, or what ``git archive`` gives of it. On a machine with other work
only such a comparison says something. Each version has a process of its own; both read the same chats, turn
about. Prints medians (and lowest tenths) of microseconds of CPU, this version's share of the other's, and the
median of the shares pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
NUM_CHATS = 12
Chat = list[dict[str, str]]


class Version:
    """One checkout in a process of its own."""

    def __init__(self, folder: Path, tokenizer: Path, api: str, template: str | None) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--serve", str(tokenizer)]
        command += ["--template", template or ""]
        self._process = subprocess.Popen(
            [*command, "--api", api], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def us(self, chat: Chat) -> float:
        """CPU time of reading this chat."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(chat), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def serve(folder: Path, tokenizer: Path, api: str, template: str | None) -> None:
    """Read chats of the standard input with the code of ``folder``; print the time of each."""
    sys.path.insert(0, str(folder))
    theirs = importlib.import_module("benchmarks.prompts")
    assert Path(theirs.__file__ or "").is_relative_to(folder), theirs.__file__
    settings = theirs.PromptSettings(prefix_cache_bytes_max=64 << 20)
    config = theirs.ModelPrompts(tokenizer_dir=str(tokenizer), chat_template=template)
    reader = theirs.PromptReader({"m": config}, settings, theirs.no_engine)

    async def main() -> None:
        text = theirs.Text()
        while not reader.stats.prefix_evictions:  # memory is reused, as in a router that has run for a while
            await theirs.read(reader, theirs.MAKE[api](theirs.turns(text, 4, 100_000)))
        for line in sys.stdin:
            step = theirs.read(reader, theirs.MAKE[api](json.loads(line)))
            print(await theirs.cpu_us(step), flush=True)

    asyncio.run(main())
    reader.close()


def compare(tokenizer: Path, other: Path, api: str, kilobytes: int, rounds: int) -> None:
    from benchmarks import prompts  # noqa: PLC0415  # a process that serves has the other version's

    template = prompts.template_of(tokenizer)  # one for both versions
    versions = [Version(folder, tokenizer, api, template) for folder in (other, HERE)]
    text = prompts.Text()
    bases = [prompts.turns(text, 2 if kilobytes < 8 else 10, kilobytes * 1000) for _ in range(NUM_CHATS)]
    times: dict[str, tuple[list[float], list[float]]] = {"cold": ([], []), "next turn": ([], [])}

    def timed(name: str, chat: Chat) -> None:
        order = (0, 1) if len(times[name][0]) % 4 < 2 else (1, 0)
        for number in order:
            times[name][number].append(versions[number].us(chat))

    for base in bases:
        timed("cold", base)
    for _ in range(rounds):
        for base in bases:
            asked = base
            for _ in range(2):
                asked = [*asked, *prompts.pair(text.take(40), text.take(100))]
                timed("next turn", asked)
    print(f"{tokenizer.name}, {api} of {kilobytes} KB, microseconds of CPU:")
    for name, (theirs, own) in times.items():
        tenth = sorted(own)[len(own) // 10] / sorted(theirs)[len(theirs) // 10]
        median = statistics.median(own) / statistics.median(theirs)
        pairs = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        print(f"  {name:10s} other {prompts.shown(theirs)}, this {prompts.shown(own)}:", end="")
        print(f" {median:.2f} ({tenth:.2f}), in pairs {pairs:.2f}", flush=True)
    for version in versions:
        version.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the other checkout")
    parser.add_argument("--api", choices=["chat", "messages"], default="chat")
    parser.add_argument("--kilobytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--template", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    other = arguments.folder.resolve()
    if arguments.serve is not None:
        serve(other, arguments.serve, arguments.api, arguments.template or None)
        return
    from benchmarks import prompts  # noqa: PLC0415  # see above

    for tokenizer in prompts.installed():
        compare(tokenizer, other, arguments.api, arguments.kilobytes, arguments.rounds)


if __name__ == "__main__":
    main()
