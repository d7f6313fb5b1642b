"""Setting for the source of a tokenizer: a directory, a repository's name, ``auto`` or ``off``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

AUTO: Final = "auto"
OFF: Final = "off"
_TOKENIZERS: Final = ("tokenizer.json", "tekken.json", "tokenizer.model.v*")
_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
# The hub's rule for names; a revision is a branch, a tag or a commit.
_REPOSITORY: Final = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,254}}))?")


class TokenizerSource(NamedTuple):
    """``name`` is a path or a repository; ``revision`` None: its main branch."""

    kind: Literal["auto", "off", "directory", "repository"]
    name: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse_source(text: str) -> TokenizerSource:
    """Parse ``models.NAME.tokenizer``. A directory of that name takes precedence over a repository."""
    if text == AUTO:
        return TokenizerSource("auto")
    if text == OFF:
        return TokenizerSource("off")
    match = _REPOSITORY.fullmatch(text)
    if match is None or ".." in text or "--" in text or Path(text).is_dir():
        return TokenizerSource("directory", text)
    return TokenizerSource("repository", match[1], match[2])


def named_by_engine(root: str) -> TokenizerSource:
    """Parse the ``root`` of a model card, which is never a keyword of the setting."""
    source = parse_source(root)
    return source if source.kind in {"directory", "repository"} else TokenizerSource("directory", root)


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory contains a tokenizer of any kind."""
    if not str(folder).strip("."):
        return False  # no name at all
    try:
        return any(any(folder.glob(name)) for name in _TOKENIZERS)
    except OSError:
        return False


def download_command(name: str, folder: str) -> str:
    """Command that fills a directory on a machine that reaches the hub."""
    return f"hf download {name} --include '*.json' 'tokenizer*' '*.jinja' --local-dir {folder}"
