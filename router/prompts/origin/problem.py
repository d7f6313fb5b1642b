"""Why a tokenizer cannot be used here, and what to do about it."""

from __future__ import annotations

from typing import Final

FAILURES: Final = (
    "gated",  # the repository wants an accepted licence and a token
    "not_found",  # no such repository or revision, or one that is private
    "rate_limited",  # the hub refuses further requests for now
    "unreachable",  # the hub does not answer, or answers with an error
    "offline",  # downloads are switched off and the cache has nothing
    "incomplete",  # a file came shorter than announced
    "disk",  # the cache cannot be written
    "too_large",  # more bytes than prompts.hub_bytes_max
    "too_slow",  # longer than prompts.hub_timeout_s
    "no_tokenizer",  # the repository or directory has no tokenizer that is read here
    "remote_code",  # its tokenizer is Python code, which is never executed
    "unusable",  # its files cannot be read, or need a package
    "not_readable",  # the engine names a path of its own machine
    "differs",  # the engine makes other tokens of the same prompts
    "not_compared",  # no engine says what its tokens are
)
_LASTING: Final = frozenset(
    {"no_tokenizer", "remote_code", "too_large", "unusable", "differs", "not_readable"}
)


class TokenizerProblem(Exception):  # noqa: N818  # not an error of the program
    """``reason`` is one of ``FAILURES``; ``str()`` says what was seen, ``remedy`` what helps."""

    def __init__(self, reason: str, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.reason = reason
        self.remedy = remedy

    @property
    def may_pass(self) -> bool:
        """Whether the same may succeed later, with nothing changed at the engines."""
        return self.reason not in _LASTING
