"""The work of one request: all its prompts, times all its answers.

Counted once, when the request is placed: what its tenant is charged, its share beside other tenants, its time
in the queue and the load of its engine follow from it, and it is corrected by what the engine reports. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvatlas.router.openai.request import Usage


class Work(msgspec.Struct, frozen=True, gc=False):
    """Tokens are predicted, by the prompt's tokens or by its size."""

    uncached_tokens: int
    """Prompt tokens that the engine should have to compute, for all answers."""
    prompt_tokens: int
    """Tokens of all prompts."""
    prompts: int = 1
    answers: int = 1
    """To each prompt."""
    again_tokens: int = 0
    """Part of ``uncached_tokens``: what is computed for each answer but a prompt's first, which stores what
    the others hit."""
    known: bool = True
    """It rests on the tokens of the prompt."""

    @property
    def sequences(self) -> int:
        """Sequences of the engine, each of which is a request there."""
        return self.prompts * self.answers

    def computed(self, usage: Usage | None) -> int:
        """Prompt tokens that were computed, by the engine's report as far as it can be right."""
        if usage is None:
            return self.uncached_tokens
        if self.sequences > 1:
            # vLLM reports the cached tokens of one sequence, which hit what its siblings stored
            # (entrypoints/openai/completion/serving.py, 0.32); the prompt tokens are those of all prompts.
            told = usage.prompt_tokens - self.prompt_tokens if self.known else 0
            whole = self.uncached_tokens + told if self.known else usage.prompt_tokens + self.again_tokens
            return max(0, whole)
        if usage.cached_tokens is not None:
            return max(0, usage.prompt_tokens - usage.cached_tokens)
        return self.uncached_tokens if self.known else usage.prompt_tokens

    def cached(self, usage: Usage) -> int:
        """Prompt tokens that came from a cache; 0 if the engine does not say."""
        if usage.cached_tokens is None:
            return 0
        return max(0, usage.prompt_tokens + self.again_tokens - self.computed(usage))


NO_WORK: Final = Work(0, 0, known=False)
