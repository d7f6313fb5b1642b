"""Files of a model are fetched and tried in a process of their own before the router loads them.

What comes from a hub was written by anybody: an answer that unpacks to a gigabyte, a vocabulary that takes
minutes, a template that doubles a text forty times. Each would end the router or hold it for good; here it
ends a child. The child fetches the repository, checks the sizes of its files, and loads tokenizer, templates
and configuration as the router would. It says before each step which file it is at, so that a child that is
ended names the file. What passed is loaded by the router itself; nothing but the folder's name comes from the
child.

Limits: memory (``_FETCH_BYTES_MAX`` while fetching, ``_MEMORY_BYTES_MAX``), CPU (``CPU_S_MAX``), bytes of a
written file (``HUB_BYTES_MAX``), bytes of each file that is loaded (``FILE_BYTES_MAX``), and
time. One child at a time; it ends with its limits even if the router is killed meanwhile. Invariant: no child
outlives the ``run`` that began it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from kvatlas.router.prompts.hub import Fetched, HubLimits, TokenizerProblem, fetch, too_slow
from kvatlas.router.prompts.settings import ModelPrompts, PromptStats
from kvatlas.router.prompts.tokenizer_source import TokenizerSource

_MEMORY_BYTES_MAX: Final = 3 << 30
_FETCH_BYTES_MAX: Final = 768 << 20
CPU_S_MAX: Final = 60
# Beside the time for fetching: several times the CPU, since others need the machine too.
_TRIAL_S_MAX: Final = 180.0
# The hub's package is imported by the first fetch.
_IMPORT_S: Final = 1.0
FILE_BYTES_MAX: Final = {"tokenizer.json": 64 << 20, "tekken.json": 64 << 20}
"""The largest known vocabularies have 35 MB. Reading one holds the router for about 10 ms per MB."""
_OTHER_BYTES_MAX: Final = 16 << 20
_TEMPLATE_BYTES_MAX: Final = 1 << 20
_REMEDY: Final = "give --tokenizer ORG/NAME or DIR with files that can be used; engines are asked for tokens"


class TrialRequest(msgspec.Struct, frozen=True):
    """``source``: a repository to fetch; None: ``prompts.tokenizer_dir`` is the directory."""

    source: TokenizerSource | None
    limits: HubLimits
    prompts: ModelPrompts
    fast: bool
    cpu_s: int = CPU_S_MAX


class _Said(msgspec.Struct, omit_defaults=True):
    """One line of the child: the file it is at, or how it ended."""

    at: str = ""
    problem: tuple[str, str, str] | None = None
    folder: str = ""
    commit: str = ""


class TriedFiles(NamedTuple):
    """A directory whose files were tried; ``commit`` "" for one that was not fetched."""

    folder: Path
    commit: str


class Trials:
    """Runs one child after the other."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def run(self, request: TrialRequest, shown: str) -> TriedFiles:
        """Fetch and try. Raises ``TokenizerProblem``; cancelled, the child ends."""
        async with self._one:
            child = _Child(request, shown)
            try:
                return await asyncio.to_thread(child.run)
            finally:
                child.end()


class _Child:
    def __init__(self, request: TrialRequest, shown: str) -> None:
        self._request = request
        self._shown = shown
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def end(self) -> None:
        """End the process, and begin none any more."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.poll() is None:
                self._process.kill()

    def run(self) -> TriedFiles:
        """In a thread: begin it, and wait for its end."""
        limits = self._request.limits
        fetch_s = limits.timeout_s if self._request.source is not None else 0.0
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"}
        with self._lock:
            if self._ended:
                raise TokenizerProblem("unusable", "the router ends", _REMEDY)
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvatlas.router.prompts.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        timed_out = False
        try:
            given = msgspec.json.encode(self._request)
            out, _ = process.communicate(given, timeout=fetch_s + _TRIAL_S_MAX)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            out, _ = process.communicate()
        return self._result(out, process.returncode, timed_out=timed_out)

    def _result(self, out: bytes, status: int, *, timed_out: bool) -> TriedFiles:
        said = [msgspec.json.decode(line, type=_Said) for line in out.splitlines() if line.endswith(b"}")]
        last = said[-1] if said else _Said()
        if last.problem is not None:
            raise TokenizerProblem(*last.problem)
        if last.folder:
            return TriedFiles(Path(last.folder), last.commit)
        at = last.at or "the process that tries it"
        if at == _FETCHING and (timed_out or status == -signal.SIGALRM):
            raise too_slow(self._request.limits)
        why = f"trying it ended with status {status}"
        if timed_out or status in {-signal.SIGXCPU, -signal.SIGALRM}:
            why = f"trying it takes more than {self._request.cpu_s} s of CPU"
        elif status < 0:
            why = f"trying it ended the process ({signal.Signals(-status).name})"
        raise TokenizerProblem("unusable", f"{self._shown}: {at}: {why}", _REMEDY)


_FETCHING: Final = "files of the hub"


def main() -> None:
    """The child: one request from stdin, lines to stdout."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    at = ""

    def say(**what: object) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(_Said(**what)) + b"\n")  # type: ignore[arg-type]
        sys.stdout.buffer.flush()

    def begin(step: str) -> None:
        nonlocal at
        at = step
        say(at=step)

    try:
        begin(_FETCHING)
        _limit(request)
        folder, commit = Path(request.prompts.tokenizer_dir or ""), ""
        if request.source is not None:
            # A download that goes on is ended by its meter; this ends one that hangs.
            signal.setitimer(signal.ITIMER_REAL, request.limits.timeout_s + _IMPORT_S)
            found: Fetched = fetch(request.source, request.limits)
            folder, commit = found.folder, found.commit
        signal.setitimer(signal.ITIMER_REAL, _TRIAL_S_MAX)
        _allow_memory(_MEMORY_BYTES_MAX)
        _try(folder, request, begin)
    except TokenizerProblem as problem:
        say(problem=(problem.reason, str(problem), problem.remedy))
    except MemoryError:
        seen = f"{request.source or request.prompts.tokenizer_dir}: {at}: takes too much memory"
        say(problem=("too_large", seen, _REMEDY))
    except Exception as error:  # noqa: BLE001  # files of others, in the hands of several packages
        from kvatlas.router.http.error_texts import describe_error  # noqa: PLC0415

        seen = f"{request.source or request.prompts.tokenizer_dir}: {at}: {describe_error(error)}"
        say(problem=("unusable", seen[:500], _REMEDY))
    else:
        say(folder=str(folder), commit=commit)


def _limit(request: TrialRequest) -> None:
    import resource  # noqa: PLC0415  # of Unix

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (request.cpu_s, request.cpu_s + 1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (request.limits.bytes_max, request.limits.bytes_max))
    _allow_memory(_FETCH_BYTES_MAX)
    os.nice(5)


def _allow_memory(count: int) -> None:
    import resource  # noqa: PLC0415

    # Of data, not of addresses: libraries reserve gigabytes that they never touch.
    resource.setrlimit(resource.RLIMIT_DATA, (count, _MEMORY_BYTES_MAX))


def check_sizes(folder: Path) -> None:
    """Raise ``TokenizerProblem`` for a file that is too large to be loaded."""
    for file in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        most = FILE_BYTES_MAX.get(file.name, _OTHER_BYTES_MAX)
        if file.suffix not in {".json", ".jinja"} or file.name.endswith(".index.json"):
            continue
        most = _TEMPLATE_BYTES_MAX if file.suffix == ".jinja" else most
        if file.is_file() and (size := file.stat().st_size) > most:
            raise TokenizerProblem("too_large", f"{file}: {size} bytes, at most {most} are loaded", _REMEDY)


def _try(folder: Path, request: TrialRequest, begin: object) -> None:
    """Load everything as the router does."""
    assert callable(begin)  # noqa: S101
    # Slow imports, which a child without a fetched file does not need.
    from kvatlas.router.prompts.local_renderer import ChatRenderer  # noqa: PLC0415
    from kvatlas.router.prompts.model_config import read_model_file  # noqa: PLC0415
    from kvatlas.router.prompts.model_dir import load_model_dir  # noqa: PLC0415
    from kvatlas.router.prompts.tokenizer import PromptTokenizer  # noqa: PLC0415

    check_sizes(folder)
    begin("tokenizer.json")
    directory = load_model_dir(folder)
    begin("the chat template")
    ChatRenderer(request.prompts, directory, PromptStats(), 0)
    if directory.tokenizer is not None:
        begin("tokenizer.json")
        PromptTokenizer(directory.tokenizer, PromptStats(), fast=request.fast)
    begin("config.json")
    read_model_file(folder)


if __name__ == "__main__":
    main()
