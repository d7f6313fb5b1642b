"""Problems that prevent the use of a tokenizer here, and their remedies."""

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
    "no_tokenizer",  # the repository or directory has no tokenizer of a supported kind
    "remote_code",  # its tokenizer is Python code, which is never executed
    "unusable",  # its files cannot be read, or need a package
    "not_readable",  # the engine names a path of its own machine
    "differs",  # the engine gives other tokens for the same prompts
    "not_compared",  # no engine reports its tokens
)
_LASTING: Final = frozenset(
    {"no_tokenizer", "remote_code", "too_large", "unusable", "differs", "not_readable"}
)


class TokenizerProblem(Exception):  # noqa: N818  # not an error of the program
    """``reason`` is one of ``FAILURES``; ``str()`` describes the finding, ``remedy`` the remedy."""

    def __init__(self, reason: str, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.reason = reason
        self.remedy = remedy

    @property
    def may_pass(self) -> bool:
        """Whether a retry may succeed later, without changes at the engines."""
        return self.reason not in _LASTING
