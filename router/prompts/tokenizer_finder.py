"""Find the tokenizers of models that engines serve and that are not configured, and keep them verified.

Per base model: the sources that its engines name are tried in turn; the loaded tokenizer is compared with
each server's own tokens, and used if all agree. Then the first prompts of clients are compared too. Until
then, and after any failure, engines are asked for the tokens as without a tokenizer. A server that joins,
comes back or shows another card is compared before it gets prompts made here; if it differs, the search
starts again. A configured directory or repository is compared in the same way, and is the operator's choice:
if it differs it stays in use, and log, ``/ready`` and doctor report it. Files that engines name are fetched
and tried in a process of their own first (``trial.py``).

Invariant: a tokenizer named by engines is in use only if it agreed with every server that is up, as far as it
was compared. One task per model, one comparison per server at a time; all on the event loop, fetching and
loading in threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from kvatlas.router.fleet.status import Fleet
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.hub import HubLimits, TokenizerProblem
from kvatlas.router.prompts.local_model import LocalModel
from kvatlas.router.prompts.model_config import ModelConfigFile, read_model_file
from kvatlas.router.prompts.model_dir import ModelDirError
from kvatlas.router.prompts.parity import compare, compare_one
from kvatlas.router.prompts.reader import PromptReader, ReadHere
from kvatlas.router.prompts.remote import EngineSide, Post
from kvatlas.router.prompts.request import NotLocalError
from kvatlas.router.prompts.settings import HUB_BYTES_MAX, ModelPrompts, PromptSettings, PromptStats
from kvatlas.router.prompts.tokenizer_source import (
    TokenizerSource,
    has_tokenizer,
    named_by_engine,
    parse_source,
)
from kvatlas.router.prompts.trial import TrialRequest, Trials

_log = structlog.get_logger()

# Interval between checks of the fleet; each costs a few microseconds while nothing changed.
_LOOK_S: Final = 0.25
# After a failed fetch; doubled each time, up to ``_RETRY_S_MAX``.
RETRY_S = 30.0
_RETRY_S_MAX: Final = 600.0
_COMPARED_AT_ONCE: Final = 8
_COMPARE_TIMEOUT_S: Final = 10.0
# Number of prompts per model that are compared after it is in use.
_FIRST_PROMPTS: Final = 4


class Located(NamedTuple):
    """``shown``: its origin for users, a path or ``ORG/NAME@COMMIT``."""

    folder: Path
    shown: str


async def locate(
    source: TokenizerSource, prompts: ModelPrompts, settings: PromptSettings, trials: Trials
) -> Located:
    """Return the directory of this source, whose files were tried. Raises ``TokenizerProblem``."""
    limits = HubLimits(settings.hub_downloads, settings.hub_endpoint, HUB_BYTES_MAX, settings.hub_timeout_s)
    fast = settings.fast_tokenizer == "auto"
    if source.kind == "repository":
        found = await trials.run(TrialRequest(source, limits, prompts, fast), str(source))
        return Located(found.folder, f"{source.name}@{found.commit[:12]}")
    if not await asyncio.to_thread(has_tokenizer, Path(source.name)):
        raise TokenizerProblem(
            "not_readable",
            f"{source.name}, where the engine has its model, is no directory with a tokenizer here",
            "mount it here too, or give --tokenizer ORG/NAME or DIR",
        )
    prompts = msgspec.structs.replace(prompts, tokenizer_dir=source.name)
    found = await trials.run(TrialRequest(None, limits, prompts, fast), source.name)
    return Located(found.folder, source.name)


class ModelOrigin(msgspec.Struct):
    """Source of the prompts of one model, for ``/ready`` and ``doctor``."""

    how: str
    """``here``, or ``engine`` while the tokenizer is searched or cannot be used."""
    source: str = ""
    """The directory, or the repository and its commit."""
    by: str = ""
    """The library that tokenizes."""
    reason: str = ""
    """Why an engine is asked: ``looking``, or a reason of ``kvatlas_prompts_tokenizer_failures_total``. With
    ``here``: ``differs``, if a configured tokenizer does not give the engines' tokens."""
    problem: str = ""
    remedy: str = ""


class _Server(NamedTuple):
    """An engine's server in the state in which it was compared: another card must be compared again."""

    base_url: str
    root: str
    max_model_len: int | None


class _Model:
    def __init__(self, name: str, origin: ModelOrigin) -> None:
        self.name = name
        self.origin = origin
        self.local: LocalModel | None = None
        self.agreed: set[_Server] = set()
        self.seen: frozenset[_Server] | None = None
        self.tries = 0
        self.retry_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.logged = ""


class TokenizerFinder:
    """``setting_of`` gives the configured ``tokenizer`` of a served model and its prompt settings; ``post``
    asks engines in the router's name; ``file_found`` is called with a model's ``config.json``."""

    def __init__(
        self,
        fleet: Fleet[Any],
        reader: PromptReader,
        settings: PromptSettings,
        post: Post,
        *,
        setting_of: Callable[[str], tuple[str, ModelPrompts]],
        file_found: Callable[[str, ModelConfigFile], None] = lambda _model, _file: None,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._reader = reader
        self._settings = settings
        self._setting_of = setting_of
        self._file_found = file_found
        self._clock = clock
        self._trials = Trials()
        patient = msgspec.structs.replace(settings, engine_timeout_s=_COMPARE_TIMEOUT_S)
        self._side = EngineSide(post, patient, PromptStats(), clock)  # these are no prompts of clients
        self._models: dict[str, _Model] = {}
        self._again = False
        self._first: asyncio.Queue[ReadHere] = asyncio.Queue(maxsize=_FIRST_PROMPTS)

    def origins(self) -> dict[str, ModelOrigin]:
        """Sources of all served base models."""
        return {name: self._origin(name) for name in sorted(self._served())}

    def _origin(self, name: str) -> ModelOrigin:
        if name in self._models:
            return self._models[name].origin
        source = parse_source(self._setting_of(name)[0])
        library = self._reader.tokenized_by(name)
        if library is not None:
            return ModelOrigin("here", source.name, library)
        return ModelOrigin("engine", reason="off" if source.kind == "off" else "looking")

    def _served(self) -> set[str]:
        return {engine.base_model for engine in self._fleet if engine.base_model is not None}

    def forget(self) -> None:
        """Start again: the configuration has changed."""
        for name in list(self._models):
            self._drop(name)

    async def run(self) -> None:
        """Check the fleet until cancelled."""
        changes = -1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._compare_first())
            while True:
                due = any(self._is_due(model) for model in self._models.values())
                if due or self._again or changes != self._fleet.changes or not self._models:
                    changes, self._again = self._fleet.changes, False
                    self._look(tasks)
                await asyncio.sleep(_LOOK_S)

    def _is_due(self, model: _Model) -> bool:
        return model.retry_at is not None and self._clock() >= model.retry_at

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        served = self._served()
        for name in self._models.keys() - served:
            self._drop(name)
        for name in sorted(served):
            source = parse_source(self._setting_of(name)[0])
            servers = frozenset(self._servers(name))
            if source.kind == "off" or not servers:
                continue
            if name not in self._models:
                self._models[name] = _Model(name, self._origin(name))
            model = self._models[name]
            # One that left is compared again when it is back.
            model.agreed &= servers
            if model.task is not None:
                self._again |= servers != model.seen
                continue
            if servers == model.seen and not self._is_due(model):
                continue
            if servers != model.seen:
                model.tries = 0
            model.seen, model.retry_at = servers, None
            model.task = tasks.create_task(self._settle(model, source, sorted(servers, key=str)))

    def _servers(self, name: str) -> list[_Server]:
        found = []
        for engine in self._fleet.ready(name):
            if engine.base_model == name:
                card = next(card for card in engine.models if card.id == name)
                found.append(_Server(engine.engine.base_url, card.root or "", card.max_model_len))
        return found

    def _drop(self, name: str) -> None:
        model = self._models.pop(name)
        if model.task is not None:
            model.task.cancel()
        self._reader.use(name, None)

    async def _settle(self, model: _Model, configured: TokenizerSource, servers: list[_Server]) -> None:
        try:
            if configured.kind == "directory":
                await self._check_directory(model, configured, servers)
                return
            if model.local is not None:
                try:
                    await self._compare(model, model.local, servers, must=False)
                # its current state, perhaps of another revision: check again
                except TokenizerProblem as problem:
                    (self._ask_engines if configured.kind == "auto" else self._keep)(model, problem)
                else:
                    self._agree(model)
                    return
            await self._find(model, configured, servers)
        except TokenizerProblem as problem:
            if configured.kind == "auto" or model.local is None:
                self._ask_engines(model, problem)
        except Exception as error:  # noqa: BLE001  # files of others, in the hands of several packages
            _log.exception("a model's tokenizer cannot be used", model=model.name)
            seen = f"{type(error).__name__}: {error}"
            self._ask_engines(model, TokenizerProblem("unusable", seen, "report it"))
        finally:
            model.task = None

    async def _find(self, model: _Model, configured: TokenizerSource, servers: list[_Server]) -> None:
        """Find, load, compare and use. Raises ``TokenizerProblem``: that of the last source."""
        roots = Counter(server.root for server in servers)
        auto = configured.kind == "auto"
        by_share = sorted(roots, key=lambda root: (-roots[root], root))
        problem: TokenizerProblem | None = None
        for source in map(named_by_engine, by_share) if auto else [configured]:
            try:
                located = await locate(source, self._setting_of(model.name)[1], self._settings, self._trials)
                if model.local is not None and located.shown == model.origin.source:
                    # configured, differs, and there is no other revision of it.
                    return
                prompts, local = await self._load(model.name, located, servers)
                model.agreed.clear()
                differs = await self._difference(model, local, servers, must=auto)
                if differs is not None and auto:
                    raise differs
            except TokenizerProblem as found:
                self._reader.stats.tokenizer_failures[found.reason] += 1
                problem = found
                continue
            self._use(model, prompts, local, located)
            if differs is not None:
                self._keep(model, differs)
            self._file_found(model.name, await asyncio.to_thread(read_model_file, located.folder))
            return
        if problem is not None:
            raise problem

    async def _check_directory(
        self, model: _Model, configured: TokenizerSource, servers: list[_Server]
    ) -> None:
        """Compare a directory that the reader loaded at start, or with the configuration."""
        local = self._reader.local_of(model.name)
        if local is None:
            return
        if model.local is not local:
            model.local = local
            model.origin = ModelOrigin("here", configured.name, local.library_names(chat=True))
            folder = Path(configured.name)
            self._reader.watch(model.name, _FIRST_PROMPTS, self._read_here)
            self._file_found(model.name, await asyncio.to_thread(read_model_file, folder))
        differs = await self._difference(model, local, servers, must=False)
        if differs is None:
            self._agree(model)
        else:
            self._keep(model, differs)

    async def _difference(
        self, model: _Model, local: LocalModel, servers: list[_Server], *, must: bool
    ) -> TokenizerProblem | None:
        try:
            await self._compare(model, local, servers, must=must)
        except TokenizerProblem as problem:
            return problem
        return None

    async def _load(
        self, name: str, located: Located, servers: list[_Server]
    ) -> tuple[ModelPrompts, LocalModel]:
        lengths = [server.max_model_len for server in servers if server.max_model_len is not None]
        prompts = msgspec.structs.replace(
            self._setting_of(name)[1],
            tokenizer_dir=str(located.folder),
            max_model_len=min(lengths, default=None),
        )
        try:
            local = await asyncio.to_thread(self._reader.load, prompts)
        except (ModelDirError, OSError) as error:
            raise TokenizerProblem(
                "unusable", f"{located.shown}: {error}", "give --tokenizer with one that can be read"
            ) from None
        if local.renderer.unreadable is not None:
            # Completions are made here regardless; doctor reports what chats need (tokens.family).
            _log.info("chats of a model are left to its engines", model=name, why=local.renderer.unreadable)
        return prompts, local

    async def _compare(self, model: _Model, local: LocalModel, servers: list[_Server], *, must: bool) -> None:
        """Compare with every server that has not agreed yet. ``must``: one of them has to report its
        tokens."""
        limit = asyncio.Semaphore(_COMPARED_AT_ONCE)

        async def one(server: _Server) -> int:
            async with limit:
                same = await compare(local, self._side, server.base_url, model.name)
            if same:
                model.agreed.add(server)
            return same

        pending = [server for server in servers if server not in model.agreed]
        results = await asyncio.gather(*map(one, pending), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if must and not model.agreed:
            raise TokenizerProblem(
                "not_compared",
                "no engine says what its tokens are: /tokenize does not answer",
                "let the router reach /tokenize, or give --tokenizer ORG/NAME or DIR to use it uncompared",
            )

    def _use(self, model: _Model, prompts: ModelPrompts, local: LocalModel, located: Located) -> None:
        self._reader.use(model.name, (prompts, local))
        self._reader.watch(model.name, _FIRST_PROMPTS, self._read_here)
        model.local, model.tries, model.logged = local, 0, ""
        model.origin = ModelOrigin("here", located.shown, local.library_names(chat=True))
        self._reader.stats.tokenizers_found += 1
        _log.info("tokenizer", model=model.name, source=located.shown, library=local.tokenizer.name)

    def _agree(self, model: _Model) -> None:
        """Note that every server that reports its tokens agrees."""
        # Until now one differed; the first prompts may have shown it, no probe.
        if model.origin.reason:
            model.origin = ModelOrigin("here", model.origin.source, model.origin.by)
            self._reader.watch(model.name, _FIRST_PROMPTS, self._read_here)

    def _keep(self, model: _Model, problem: TokenizerProblem) -> None:
        """Keep a configured tokenizer that differs, and report it."""
        origin = model.origin
        model.origin = ModelOrigin(
            "here", origin.source, origin.by, problem.reason, str(problem), problem.remedy
        )
        if model.logged != str(problem):
            model.logged = str(problem)
            self._reader.stats.tokenizer_failures[problem.reason] += 1
            _log.warning(
                "the configured tokenizer is used although it does not give an engine's tokens",
                model=model.name,
                source=origin.source,
                reason=problem.reason,
                why=str(problem),
                remedy=problem.remedy,
            )

    def _ask_engines(self, model: _Model, problem: TokenizerProblem) -> None:
        if model.local is not None:
            self._reader.use(model.name, None)
            self._reader.stats.tokenizer_failures[problem.reason] += 1
            model.local = None
            model.agreed.clear()
        model.origin = ModelOrigin(
            "engine", reason=problem.reason, problem=str(problem), remedy=problem.remedy
        )
        if problem.may_pass:
            wait = RETRY_S * 2**model.tries
            model.tries = min(model.tries + 1, 16)
            model.retry_at = self._clock() + min(wait, _RETRY_S_MAX)
        if model.logged != str(problem):
            model.logged = str(problem)
            _log.warning(
                "engines are asked for the tokens of a model's prompts",
                model=model.name,
                reason=problem.reason,
                why=str(problem),
                remedy=problem.remedy,
            )

    def _read_here(self, read: ReadHere) -> None:
        if not self._first.full():
            self._first.put_nowait(read)

    async def _compare_first(self) -> None:
        """Compare prompts of clients, one after the other."""
        while True:
            read = await self._first.get()
            model = self._models.get(read.model)
            servers = self._servers(read.model)
            if model is None or model.local is None or not servers:
                continue
            local, url = model.local, servers[0].base_url
            try:
                await compare_one(local, self._side, url, read.path, read.body, read.ids, "first prompts")
            except TokenizerProblem as problem:
                if model.local is local:
                    auto = parse_source(self._setting_of(model.name)[0]).kind == "auto"
                    (self._ask_engines if auto else self._keep)(model, problem)
            except (NotLocalError, ApiError):
                pass
