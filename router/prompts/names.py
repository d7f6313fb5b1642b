"""Which configured model a request's name means: the model itself, or one of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from publisher.block_hash import PromptExtras
from router.prompts.config import ANY_MODEL, ModelPrompts
from router.prompts.request import NotLocalError
from router.prompts.sizes import compact

_ENCODER = msgspec.json.Encoder()


class ModelTarget(msgspec.Struct, frozen=True):
    """The model a request is for: its configuration's name, and the adapter."""

    name: str
    lora_name: str | None = None
    lora_path: str | None = None

    def extras(self, salt: Any) -> PromptExtras:
        """What hashes cover besides tokens and images. Raises ``NotLocalError`` for no valid salt."""
        if salt is not None and not (isinstance(salt, str) and salt):
            raise NotLocalError("field")
        return PromptExtras(self.lora_name, self.lora_path, salt)

    def scope(self, extras: PromptExtras) -> bytes:
        """What separates prompts of equal text: the model, and what hashes cover besides tokens."""
        return compact(_ENCODER.encode([self.name, extras]))


class ModelNames:
    """The configured models by served name (``*``: any other); ``is_adapter`` tells LoRA names."""

    def __init__(self, models: Mapping[str, ModelPrompts], is_adapter: Callable[[str], bool]) -> None:
        self.models = dict(models)
        self._is_adapter = is_adapter

    def target(self, model: str | None) -> ModelTarget:
        """Which configuration a model name means. Raises ``NotLocalError`` where none does."""
        models = self.models
        if model is None:
            bases = [name for name in models if name != ANY_MODEL] or list(models)
            if len(bases) != 1:
                raise NotLocalError("model_unknown")
            return ModelTarget(bases[0])
        if model in models and model != ANY_MODEL:
            return ModelTarget(model)
        for name, config in models.items():
            if model in config.lora_paths:
                return ModelTarget(name, model, config.lora_paths[model])
        if ANY_MODEL in models and not self._is_adapter(model):
            return ModelTarget(ANY_MODEL)
        raise NotLocalError("lora_path_unknown" if models else "model_unknown")
