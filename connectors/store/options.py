"""Reads the settings of a store: every key is known, every value in range, or the error names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.errors import ConfigError
from connectors.settings import size_bytes


class Options:
    """One mapping of settings; ``where`` is its name in errors. Read all keys, then call ``finish``."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._known: set[str] = set()

    def key(self, name: str) -> str:
        """The full name of a setting, for errors."""
        return f"{self._where}.{name}"

    def text(self, name: str, default: str | None = None, *, choices: tuple[str, ...] = ()) -> str:
        """A text that is not empty, unless that is the default; ``default`` None: it must be given."""
        value = self._get(name, default)
        if not isinstance(value, str) or (not value and value != default):
            raise ConfigError(self.key(name), value, "give a text")
        if choices and value not in choices:
            raise ConfigError(self.key(name), value, f"choose one of: {', '.join(choices)}")
        return value

    def file(self, name: str) -> Path | None:
        """A path to a file that can be read, or None where it is not given."""
        value = self.text(name, "")
        if not value:
            return None
        path = Path(value)
        try:
            with path.open("rb"):
                return path
        except OSError as error:
            raise ConfigError(
                self.key(name), value, f"name a file that can be read ({error.strerror})"
            ) from error

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(self.key(name), value, "give a number")
        if not low <= value <= high:
            raise ConfigError(self.key(name), value, f"give a number from {low} to {high}")
        return float(value)

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self.number(name, default, low=low, high=high)
        if value != int(value):
            raise ConfigError(self.key(name), value, "give a whole number")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(self.key(name), value, "give true or false")
        return value

    def size(self, name: str, default: str) -> int:
        """Bytes, given as a number or as text such as "8GiB"."""
        return size_bytes(self._get(name, default), self.key(name))

    def finish(self) -> None:
        """ConfigError for a key that nobody read."""
        for name in self._values:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                raise ConfigError(self.key(name), self._values[name], f"no such setting; there are: {known}")

    def _get(self, name: str, default: object) -> Any:
        self._known.add(name)
        value = self._values.get(name, default)
        if value is None:
            raise ConfigError(self.key(name), None, "it must be given")
        return value
