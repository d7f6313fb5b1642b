"""The configured model or adapter that a request's model name selects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from kvatlas.publisher.block_hash import NO_EXTRAS, PromptExtras
from kvatlas.router.prompts.request import (
    NotLocalError,
    compact,
)
from kvatlas.router.prompts.settings import ANY_MODEL, ModelPrompts

_ENCODER = msgspec.json.Encoder()


class ModelTarget:
    """The model of a request: its configuration's name, and the adapter."""

    __slots__ = ("lora_name", "name", "unsalted", "unsalted_scope")

    def __init__(self, name: str, lora_name: str | None = None, lora_path: str | None = None) -> None:
        self.name = name
        self.lora_name = lora_name
        # Extra inputs and scope of a prompt without a salt.
        self.unsalted = NO_EXTRAS if lora_name is None else PromptExtras(lora_name, lora_path)
        self.unsalted_scope = self._scope(self.unsalted)

    def extras(self, salt: Any) -> PromptExtras:
        """Return the extra inputs of hashes besides tokens and images. Raises ``NotLocalError`` for an
        invalid salt."""
        if salt is None:
            return self.unsalted
        if not (isinstance(salt, str) and salt):
            raise NotLocalError("field")
        return msgspec.structs.replace(self.unsalted, cache_salt=salt)

    def scope(self, extras: PromptExtras) -> bytes:
        """Return the inputs that separate prompts of equal text: the model, and the extra inputs of
        hashes."""
        return self.unsalted_scope if extras is self.unsalted else self._scope(extras)

    def _scope(self, extras: PromptExtras) -> bytes:
        return compact(_ENCODER.encode([self.name, extras]))


_adapter: Final = lru_cache(maxsize=1024)(ModelTarget)
"""Cached, since the scope of each is encoded."""


class ModelNames:
    """The configured models by served name (``*``: any other); ``is_adapter`` tells LoRA names."""

    def __init__(self, models: Mapping[str, ModelPrompts], is_adapter: Callable[[str], bool]) -> None:
        self.models = dict(models)
        self._is_adapter = is_adapter
        self._named = {name: ModelTarget(name) for name in models if name != ANY_MODEL}
        self._any = ModelTarget(ANY_MODEL) if ANY_MODEL in models else None
        bases = [name for name in models if name != ANY_MODEL] or list(models)
        self._only = ModelTarget(bases[0]) if len(bases) == 1 else None

    def target(self, model: str | None) -> ModelTarget:
        """Resolve a model name. Raises ``NotLocalError`` for an unknown name."""
        if model is None:
            if self._only is None:
                raise NotLocalError("model_unknown")
            return self._only
        found = self._named.get(model)
        if found is not None:
            return found
        # Engines may report adapters at any time.
        for name, config in self.models.items():
            if model in config.lora_paths:
                return _adapter(name, model, config.lora_paths[model])
        if self._any is not None and not self._is_adapter(model):
            return self._any
        raise NotLocalError("lora_path_unknown" if self.models else "model_unknown")
