"""The error a connector's constructor raises for what its user can mend."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key, the value found and what to do about it."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key = key
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.remedy)
