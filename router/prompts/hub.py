"""Files of a repository needed for prompts, from the hub or its cache, and problems with a tokenizer.

``huggingface_hub`` does the work, so its cache and its environment apply: HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. The commit is resolved first and every file is taken from it.

Invariants: only files named here are fetched, never weights or code; nothing of a repository is executed; all
files together are at most ``bytes_max`` and the time ``timeout_s``, both measured during the download.
Blocking: for the process of a trial (``trial.py``).
"""

from __future__ import annotations

import errno
import itertools
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.prompts.tokenizer_source import TokenizerSource

_LASTING: Final = frozenset(
    {"no_tokenizer", "remote_code", "too_large", "unusable", "differs", "not_readable"}
)


class TokenizerProblem(Exception):  # noqa: N818  # not an error of the program
    """``reason`` is one of ``settings.FAILURES``; ``str()`` describes the finding, ``remedy`` the remedy."""

    def __init__(self, reason: str, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.reason = reason
        self.remedy = remedy

    @property
    def may_pass(self) -> bool:
        """Whether a retry may succeed later, without changes at the engines."""
        return self.reason not in _LASTING


_FILES: Final = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|chat_template\.(jinja|json)|config\.json"
    r"|(pre)?processor_config\.json|tekken\.json|tokenizer\.model\.v[0-9][0-9a-z.]*"
    r"|additional_chat_templates/[^/]+\.jinja"
)
_MISTRAL: Final = re.compile(r"tekken\.json|tokenizer\.model\.v.*")
_TEMPLATES: Final = "additional_chat_templates"
# Entries of a repository's listing; the largest have some hundred files of weights.
_ENTRIES_MAX: Final = 10_000
_FILES_MAX: Final = 64
_METADATA_TIMEOUT_S: Final = 10.0
_CODE: Final = re.compile(r"^\[Errno -?\d+\] ")
_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})


class HubLimits(NamedTuple):
    """``endpoint`` "": the environment's; ``downloads`` false: only the cache."""

    downloads: bool
    endpoint: str
    bytes_max: int
    timeout_s: float


class Fetched(NamedTuple):
    """A directory of the cache, and its commit."""

    folder: Path
    commit: str


def fetch(source: TokenizerSource, limits: HubLimits) -> Fetched:
    """The directory with this repository's files. Raises ``TokenizerProblem``."""
    from huggingface_hub import constants  # noqa: PLC0415  # takes 0.3 s, and many directories are local

    if not limits.downloads or constants.HF_HUB_OFFLINE:
        return _cached(source, limits, None)
    try:
        return _fetched(source, limits)
    except TokenizerProblem as problem:
        if problem.reason not in {"unreachable", "rate_limited", "too_slow"}:
            raise
        return _cached(source, limits, problem)


def _cached(source: TokenizerSource, limits: HubLimits, problem: TokenizerProblem | None) -> Fetched:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    for name in ("tokenizer.json", "tekken.json"):
        found = try_to_load_from_cache(source.name, name, revision=source.revision)
        if isinstance(found, str):
            return Fetched(Path(found).parent, Path(found).parent.name)
    if problem is not None:
        raise problem
    why = "HF_HUB_OFFLINE is set" if limits.downloads else "prompts.hub_downloads = false"
    raise TokenizerProblem(
        "offline",
        f"{source} is not in the hub's cache on this machine, and {why}",
        "allow downloads, or give --tokenizer DIR, filled on a machine that reaches the hub",
    )


def _fetched(source: TokenizerSource, limits: HubLimits) -> Fetched:
    from huggingface_hub import HfApi, hf_hub_download  # noqa: PLC0415

    meter = _Meter(limits)
    endpoint = limits.endpoint or None
    downloading = False
    try:
        api = HfApi(endpoint=endpoint, library_name="kvatlas")
        commit = api.model_info(
            source.name, revision=source.revision or "main", timeout=_METADATA_TIMEOUT_S
        ).sha
        if commit is None:
            raise TokenizerProblem("unreachable", f"{source}: the hub names no commit", "try again later")
        sizes = _sizes(api.list_repo_tree(source.name, revision=commit))
        if _TEMPLATES in sizes:
            sizes |= _sizes(api.list_repo_tree(source.name, _TEMPLATES, revision=commit))
        wanted = _wanted(source, sizes, limits)
        downloading = True
        for name in wanted:
            meter.check()
            file = hf_hub_download(
                source.name,
                name,
                revision=commit,
                endpoint=endpoint,
                etag_timeout=_METADATA_TIMEOUT_S,
                library_name="kvatlas",
                tqdm_class=meter.progress(),
            )
            if name == wanted[-1]:
                folder = Path(file).parents[name.count("/")]
                _note(folder, source, commit)
                return Fetched(folder, commit)
    except TokenizerProblem:
        raise
    except Exception as error:  # noqa: BLE001  # of the package, its HTTP client, the system
        raise _problem_of(error, source, downloading=downloading) from None
    raise AssertionError("there is always a file")


def _note(folder: Path, source: TokenizerSource, commit: str) -> None:
    """Record the revision's commit in the hub's cache: files were fetched by commit."""
    if source.revision != commit:
        ref = folder.parent.parent / "refs" / (source.revision or "main")
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)


def _sizes(entries: Iterable[Any]) -> dict[str, int]:
    """Path -> bytes; folders have none."""
    return {entry.path: getattr(entry, "size", 0) for entry in itertools.islice(entries, _ENTRIES_MAX)}


def _wanted(source: TokenizerSource, sizes: dict[str, int], limits: HubLimits) -> list[str]:
    """The files to fetch, the tokenizer last: a directory of the cache that has it is complete."""
    found = [name for name in sizes if _FILES.fullmatch(name)]
    mistral = [name for name in found if _MISTRAL.fullmatch(name)]
    if any(name.startswith("consolidated") and name.endswith(".safetensors") for name in sizes):
        # Engines use Mistral's tokenizer if the model has Mistral's weights.
        if mistral:
            found = [name for name in found if name != "tokenizer.json"]
    elif "tokenizer.json" in found:
        found = [name for name in found if name not in mistral]
    if not mistral and "tokenizer.json" not in found:
        raise _no_tokenizer(source, sizes)
    size = sum(sizes[name] for name in found)
    if size > limits.bytes_max or len(found) > _FILES_MAX:
        raise _too_large(f"{source}: {len(found)} files of {size} bytes", limits)
    return sorted(found, key=lambda name: (name in {"tokenizer.json", *mistral}, name))


def _no_tokenizer(source: TokenizerSource, sizes: dict[str, int]) -> TokenizerProblem:
    if any(name.endswith(".py") and "tokeniz" in name for name in sizes):
        return TokenizerProblem(
            "remote_code",
            f"{source}: its tokenizer is Python code (trust_remote_code), and no tokenizer.json is there",
            "nothing: a repository's code is not executed here; a render server (--renderer) spares engines",
        )
    return TokenizerProblem(
        "no_tokenizer",
        f"{source} has no tokenizer.json and no tekken.json",
        'name the repository that has it: --tokenizer ORG/NAME, or models."NAME".tokenizer',
    )


def _too_large(seen: str, limits: HubLimits) -> TokenizerProblem:
    return TokenizerProblem(
        "too_large",
        f"{seen}, over the limit of {limits.bytes_max} bytes",
        "give a directory with the tokenizer's files alone: --tokenizer DIR",
    )


class _Meter:
    """Ends a download that is too large or takes too long, while it runs."""

    def __init__(self, limits: HubLimits) -> None:
        self._limits = limits
        self._bytes = 0
        self._ends_s = time.monotonic() + limits.timeout_s

    def check(self, more: int = 0) -> None:
        """Count received bytes. Raises ``TokenizerProblem``."""
        self._bytes += more
        if self._bytes > self._limits.bytes_max:
            raise _too_large("the hub sends more than it announced", self._limits)
        if time.monotonic() > self._ends_s:
            raise too_slow(self._limits)

    def progress(self) -> type[Any]:
        """Progress class for the package: shows nothing, and counts."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

        meter = self

        class Progress(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread that watches it

            def __init__(self, *args: Any, **given: Any) -> None:
                given.pop("name", None)
                super().__init__(*args, **{**given, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                meter.check(max(0, int(n or 0)))
                return None

        return Progress


def too_slow(limits: HubLimits) -> TokenizerProblem:
    """Return the problem of a fetch that timed out."""
    return TokenizerProblem(
        "too_slow",
        f"the files did not come within prompts.hub_timeout_s = {limits.timeout_s:g}",
        "raise that setting, name a nearer mirror (prompts.hub_endpoint), or give --tokenizer DIR",
    )


def _problem_of(error: Exception, source: TokenizerSource, *, downloading: bool) -> TokenizerProblem:
    from huggingface_hub import errors  # noqa: PLC0415

    text = " ".join(str(error).split())[:200]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return TokenizerProblem(
            "gated",
            f"{source} is gated",
            "accept its conditions on the hub and give the router a token of that account (HF_TOKEN)",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return TokenizerProblem(
            "not_found", f"{source}: no such revision", "name one that exists (@REVISION)"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in {401, 403, 404}:
        return TokenizerProblem(
            "not_found",
            f"{source}: the hub has no such repository, or it is private",
            "give --tokenizer with the right name or a directory; for private ones a token (HF_TOKEN)",
        )
    if status == 429:
        return TokenizerProblem(
            "rate_limited",
            f"{source}: the hub refuses further requests for now (429)",
            "give a token (HF_TOKEN) or a mirror (prompts.hub_endpoint); it is tried again",
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return TokenizerProblem(
            "disk",
            f"{source}: the hub's cache cannot be written: {error.strerror}",
            "make room, or set HF_HOME to a directory that can be written",
        )
    if downloading and status is None:
        return TokenizerProblem(
            "incomplete", f"{source}: a file did not come whole: {text}", "nothing: it is tried again"
        )
    return TokenizerProblem(
        "unreachable",
        f"{source}: the hub cannot be reached: {_CODE.sub('', text) or describe_error(error)}",
        "let the router reach the hub, name a mirror (prompts.hub_endpoint), or give --tokenizer DIR",
    )
