"""A reader of a page: types its commands as written into one shell, on a machine of his own.

The machine is a network namespace with the addresses that pages use, so every port is free and nothing of
this machine is reached; with the shell all that it started ends. ``PATH`` has a fresh machine's programs, and
stand-ins where a page names what is not here: ``vllm`` is the simulated engine with the same flags.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
ISOLATED = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
_NETWORK = """
import fcntl, socket, struct, sys
control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
for number, address in enumerate(sys.argv[1:]):  # SIOCSIFADDR
    words = struct.pack("16sHH4s8x", b"lo:%d" % number, socket.AF_INET, 0, socket.inet_aton(address))
    fcntl.ioctl(control, 0x8916, words)
"""
_SHELL = """
set -o pipefail -o errtrace
trap 'failed=$?; echo "status $failed: $BASH_COMMAND"' ERR
while IFS= read -r asked <&3; do
    failed=0
    eval "$(cat "$asked")" </dev/null >"$asked.said" 2>&1
    echo "$failed" >&4
done
"""
VLLM = """#!{python}
import json, os, sys
words = sys.argv[1:]
def of(flag, default=""):
    return words[words.index(flag) + 1] if flag in words else default
assert words[0] == "serve" and "--enable-prompt-tokens-details" in words, words
made = ["engine", "--host", of("--host", "127.0.0.1"), "--port", of("--port", "8000")]
events = json.loads(of("--kv-events-config", "{{}}"))
assert not events or (events["enable_kv_cache_events"] and events["publisher"] == "zmq"), events
ports = [events[key].rpartition(":")[2] for key in ("endpoint", "replay_endpoint")] if events else []
settings = dict(zip(("events_port", "replay_port"), ports), model=of("--served-model-name", words[1]))
settings["publish_events"] = "true" if events else "false"
for key, value in settings.items():
    made += ["--set", f"{{key}}={{value}}"]
os.execv({kvatlas!r}, [{kvatlas!r}, *made])
"""


MODEL = "Qwen/Qwen3-0.6B"
"""The model that pages serve."""


def cached(home: Path, model: str) -> None:
    """Put the simulated engines' tokenizer into the hub's cache, where vLLM has put the model's."""
    folder = home / ".cache/huggingface/hub" / f"models--{model.replace('/', '--')}"
    shutil.copytree(DEMO_TOKENIZER_DIR, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


_PART = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """Commands of a page, and the heading that they are under."""

    heading: str
    text: str


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Fenced blocks of a page in these languages, in order."""
    heading = ""
    pattern = re.compile(
        r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
    )
    for found in pattern.finditer(page.read_text(encoding="utf-8")):
        if found["heading"]:
            heading = found["heading"]
        elif found["language"] in languages:
            yield Block(heading, found["text"])


class Said(NamedTuple):
    """Output of a block, and the status of its last command that failed."""

    status: int
    text: str


class Reader:
    """The shell.

    ``python`` is the interpreter of the environment where kvatlas is installed; ``programs`` are names and
    texts of stand-ins, ``addresses`` and ``names`` (name -> address) those of the machine.
    """

    def __init__(
        self,
        folder: Path,
        python: Path,
        programs: dict[str, str] | None = None,
        *,
        addresses: tuple[str, ...] = (),
        names: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder / "here"
        self._asked = folder / "asked"
        self._count = 0
        home, bin_ = folder / "home", folder / "bin"
        for made in (self.folder, self._asked, home, bin_):
            made.mkdir(parents=True, exist_ok=True)
        kvatlas = str(python.with_name("kvatlas"))
        texts = {"vllm": VLLM.format(python=sys.executable, kvatlas=kvatlas), **(programs or {})}
        for name, text in texts.items():
            (bin_ / name).write_text(text)
            (bin_ / name).chmod(0o755)
        cached(home, MODEL)
        hosts = folder / "hosts"
        known = {"localhost": "127.0.0.1", **(names or {})}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        begin = f"{sys.executable} -c '{_NETWORK}' {' '.join(addresses)} && mount --bind {hosts} /etc/hosts"
        self._script = f"{begin} || exit 9\n{_SHELL}"
        self._environ = {
            "PATH": f"{bin_}:{python.parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "LANG": "C.UTF-8",
        }

    def __enter__(self) -> Self:
        for program in ("unshare", "curl", "bash", "mount"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        asked, said = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [*ISOLATED, "bash", "-c", f"exec 3<&{asked[0]} 4>&{said[1]}\n{self._script}"],
            cwd=self.folder,
            env=self._environ,
            pass_fds=(asked[0], said[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(asked[0])
        os.close(said[1])
        self._to = os.fdopen(asked[1], "w")
        self._from = os.fdopen(said[0])
        if self.type("true") is None:
            why = self._process.communicate()[0].strip()
            self.__exit__(None, None, None)
            pytest.skip(f"no network namespace can be made here: {why}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):  # of what a shell that has ended was still given
            self._to.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._from.close()

    def type(self, text: str) -> Said | None:
        """Type a block, and wait until the shell has run it; None where the shell has ended."""
        self._count += 1
        block = self._asked / str(self._count)
        block.write_text(text)
        try:
            print(block, file=self._to, flush=True)
        except BrokenPipeError:
            return None
        status = self._from.readline()
        if not status:
            return None
        return Said(int(status), block.with_name(f"{block.name}.said").read_text(errors="replace"))

    def run(self, block: Block) -> str:
        """Output of a block of a page; it has to succeed."""
        said = self.type(block.text)
        assert said is not None, "the shell has ended"
        logs = "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
        assert said.status == 0, f"under {block.heading!r}:\n{block.text}\n{said.text}\n{logs}"
        return said.text


def verified(reader: Reader, block: Block) -> None:
    """Run a block that ends with the receipts, until one has a hit that was predicted: what stores a block is
    heard of a moment later, on a busy machine a long one."""
    while True:
        said = reader.run(block)
        receipts = json.loads(said[said.index("[\n") :])
        if any(receipt["outcome"] == "exact" and receipt["actual_tokens"] for receipt in receipts):
            return
