"""Where the LoRA adapters of each model are: what was configured, completed by what the engines say.

Engines hash an adapter's path into the keys of its blocks, and every engine of a model says the same. Always
true: what is configured is never replaced by what an engine says, and a model has one dict for as long as it
is configured, so that readers and layouts that were given it see every change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.prompts.config import ANY_MODEL

Configured = Mapping[str, Mapping[str, str]]
"""Name of a model (``ANY_MODEL`` as well: of those not named) -> adapter -> path."""


class AdapterPaths:
    """``configured`` may change (``configure``)."""

    def __init__(self, configured: Configured) -> None:
        self._configured = configured
        self._paths: dict[str, dict[str, str]] = {}
        self._own: dict[str, dict[str, str]] = {}
        """By served model, of those that are not configured by name."""

    def of(self, model: str) -> dict[str, str]:
        """Adapter -> path of a served model; shared, not to be changed."""
        name = self._name(model)
        return self.named(name, self._configured[name])

    def named(self, name: str, configured: Mapping[str, str]) -> dict[str, str]:
        """The same of a configuration's name, which may be about to be configured so."""
        return self._paths.setdefault(name, dict(configured))

    def own(self, model: str) -> dict[str, str]:
        """The same without the adapters of other models that are not configured by name either."""
        if model in self._configured:
            return self.of(model)
        return self._own.setdefault(model, dict(self._configured[ANY_MODEL]))

    def learn(self, model: str, paths: Mapping[str, str]) -> None:
        """What an engine of this model says."""
        configured = self._configured[self._name(model)]
        learned = {name: path for name, path in paths.items() if name not in configured}
        for known in (self.of(model), self.own(model)):
            known.update(learned)

    def keep(self, model: str, served: Iterable[str]) -> None:
        """Only these adapters of the model are served still, or may be: those configured stay."""
        stay = {*served, *self._configured[self._name(model)]}
        for known in (self.of(model), self.own(model)):
            for name in known.keys() - stay:
                del known[name]

    def configure(self, configured: Configured) -> None:
        """Start over from other settings; dicts that were given out are what they say now."""
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
