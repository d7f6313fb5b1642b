"""Settings in ``kv_connector_extra_config``, parsed and checked once at start.

Unknown keys and values out of range are errors, so that a misspelt limit does not silently become the
default. Sizes may be numbers of bytes or text such as ``"8GiB"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvatlas.publisher.pool.retention_order import OWNER_SHARE


class ConfigError(ValueError):
    """An invalid setting. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key = key
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.remedy)


POLICIES = ("lru", "boundary", "hinted")
LAYOUTS = ("BLHNC", "engine")
_TOKENS_MAX = 1 << 40
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class OffloadSettings:
    """Limits and choices of one connector. Times in seconds, sizes in bytes, for the whole engine."""

    host_bytes: int
    """Host memory for rows, of all ranks together."""
    policy: str = "boundary"
    """Eviction policy when the host memory is full: ``lru``, ``boundary`` or ``hinted``."""
    hint_share: float = OWNER_SHARE
    """Policy ``hinted``: the largest share of the rows that the retention hints of one tenant cover."""
    pinned_source_blocks_max: float = 0.1
    """Largest share of the GPU's blocks that running stores may pin; beyond it, stores wait."""
    lookup_deadline_s: float = 0.05
    """How long a request may wait for a lookup; after that it is computed."""
    load_min_tokens: int = 1
    """Hits that would load fewer tokens than this are computed instead."""
    store_generated: bool = True
    """Also store the blocks that decoding fills, not only those of prompts."""
    store_threshold: int = 1
    """Store a block after this many requests have computed or read it; 2 skips blocks used only once."""
    share_replicas: bool = True
    """Keep one copy for all ranks that hold the same KV (MLA), in shared memory."""
    layout: str = "BLHNC"
    """``BLHNC``: ask vLLM to place all layers of a block side by side; ``engine``: leave it to vLLM."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], where: str, *, others: Iterable[str] = ()) -> Self:
        """Parse ``kv_connector_extra_config``; ``where``: its name in errors, ``others``: keys read
        elsewhere.

        Raises ``ConfigError`` for an unknown key, a missing ``host_bytes`` or a value out of range.
        """
        options = Options(extra, where)
        if "host_bytes" not in extra:
            raise ConfigError(options.key("host_bytes"), None, 'say how much host memory to use, e.g. "8GiB"')
        share, pinned = cls.hint_share, cls.pinned_source_blocks_max
        settings = cls(
            host_bytes=options.size("host_bytes", None),
            policy=options.text("policy", cls.policy, choices=POLICIES),
            hint_share=options.number("hint_share", share, low=0, high=1, above=True),
            pinned_source_blocks_max=options.number(
                "pinned_source_blocks_max", pinned, low=0, high=1, above=True
            ),
            lookup_deadline_s=options.number(
                "lookup_deadline_s", cls.lookup_deadline_s, low=0, high=60, above=True
            ),
            load_min_tokens=options.whole("load_min_tokens", cls.load_min_tokens, low=1, high=_TOKENS_MAX),
            store_generated=options.flag("store_generated", default=cls.store_generated),
            store_threshold=options.whole("store_threshold", cls.store_threshold, low=1, high=_TOKENS_MAX),
            share_replicas=options.flag("share_replicas", default=cls.share_replicas),
            layout=layout_setting(options),
        )
        options.finish(others)
        return settings


class Options:
    """A mapping of settings that is checked while it is read; ``where`` is its name in errors.

    Read all keys, then call ``finish``, which raises for unknown keys.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._known: set[str] = set()

    def key(self, name: str) -> str:
        """The full name of a setting, for errors."""
        return f"{self._where}.{name}"

    def text(self, name: str, default: str | None = None, *, choices: tuple[str, ...] = ()) -> str:
        """A non-empty text, or the default; without a default the key is required."""
        value = self._get(name, default)
        if not isinstance(value, str) or (not value and value != default):
            raise ConfigError(self.key(name), value, "give a text")
        if choices and value not in choices:
            raise ConfigError(self.key(name), value, f"choose one of: {', '.join(choices)}")
        return value

    def file(self, name: str) -> Path | None:
        """Path of a readable file, or None if it is not given."""
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

    def number(self, name: str, default: float, *, low: float, high: float, above: bool = False) -> float:
        """A number from ``low`` to ``high``; with ``above``, not ``low`` itself."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(self.key(name), value, "give a number")
        if not low <= value <= high or (above and value == low):
            words = f"above {low} and up to" if above else f"from {low} to"
            raise ConfigError(self.key(name), value, f"give a number {words} {high}")
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

    def size(self, name: str, default: str | None) -> int:
        """Bytes, given as a number or as text such as "8GiB"."""
        return size_bytes(self._get(name, default), self.key(name))

    def finish(self, others: Iterable[str] = ()) -> None:
        """Raise ConfigError for an unknown key; ``others`` are read elsewhere."""
        self._known.update(others)
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


def layout_setting(options: Options) -> str:
    """Parse ``layout`` alone: vLLM needs it before it makes the connector."""
    return options.text("layout", OffloadSettings.layout, choices=LAYOUTS)


def size_bytes(value: object, key: str) -> int:
    """Parse a size such as ``4096``, ``"512 MiB"`` or ``"8G"``. ``ConfigError`` for anything else and
    zero."""
    remedy = 'give a positive number of bytes, or text such as "8GiB" or "500MB"'
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)) and found[2].lower() in _UNITS:
        value = int(float(found[1]) * _UNITS[found[2].lower()])
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(key, value, remedy)
    return value
