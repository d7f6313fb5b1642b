"""Paths of each model's LoRA adapters: configured ones, completed by the engines' reports.

Engines hash an adapter's path into the keys of its blocks, and all engines of a model report the same path.
Invariants: a configured path is never replaced by a reported one, and a model keeps one dict while it is
configured, so that readers and layouts see every change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvatlas.router.prompts.settings import ANY_MODEL

Configured = Mapping[str, Mapping[str, str]]
"""Model name (also ``ANY_MODEL``: models without an entry) -> adapter -> path."""


class AdapterPaths:
    """Adapter paths by model; ``configured`` may change (``configure``)."""

    def __init__(self, configured: Configured) -> None:
        self._configured = configured
        self._paths: dict[str, dict[str, str]] = {}
        self._own: dict[str, dict[str, str]] = {}
        """By served model without an entry of its own."""

    def paths_of_model(self, model: str) -> dict[str, str]:
        """Adapter -> path of a served model; shared, must not be changed."""
        name = self._name(model)
        return self.named(name, self._configured[name])

    def named(self, name: str, configured: Mapping[str, str]) -> dict[str, str]:
        """The same for a configuration's name, which may be about to be configured."""
        return self._paths.setdefault(name, dict(configured))

    def own_paths(self, model: str) -> dict[str, str]:
        """The same without the adapters of other models that are not configured by name either."""
        if model in self._configured:
            return self.paths_of_model(model)
        return self._own.setdefault(model, dict(self._configured[ANY_MODEL]))

    def learn(self, model: str, paths: Mapping[str, str]) -> None:
        """Note the paths that an engine of this model reports."""
        configured = self._configured[self._name(model)]
        learned = {name: path for name, path in paths.items() if name not in configured}
        for known in (self.paths_of_model(model), self.own_paths(model)):
            known.update(learned)

    def keep(self, model: str, served: Iterable[str]) -> None:
        """Drop adapters of the model that are no longer served; configured ones stay."""
        stay = {*served, *self._configured[self._name(model)]}
        for known in (self.paths_of_model(model), self.own_paths(model)):
            for name in known.keys() - stay:
                del known[name]

    def configure(self, configured: Configured) -> None:
        """Start again from other settings; dicts that were handed out are updated."""
        self._configured = configured
        for paths in self._own.values():
            paths.clear()
            paths.update(configured[ANY_MODEL])
        for name, paths in list(self._paths.items()):
            paths.clear()
            if name in configured:
                paths.update(configured[name])
            else:
                del self._paths[name]

    def _name(self, model: str) -> str:
        return model if model in self._configured else ANY_MODEL
