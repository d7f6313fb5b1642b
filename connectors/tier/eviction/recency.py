"""Eviction by recency, with and without frequency.

``LruPolicy``: the key unused for longest. ``ArcPolicy``: recency against frequency, balanced by what was
missed (Megiddo and Modha, FAST 2003).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from connectors.tier.eviction.base import Spared


class LruPolicy:
    """Least recently used first; of keys used together, the last of the prompt goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        self.use([key for key in chain if key in self._order])

    def end_chain(self, added: Sequence[bytes]) -> None:
        for key in reversed(added):
            self._order[key] = None

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._order[key]

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        chosen = list(islice((key for key in self._order if not spared(key)), count))
        for key in chosen:
            del self._order[key]
        return chosen


class ArcPolicy:
    """Adaptive replacement: keys seen once and keys seen again share the slots by what was missed lately.

    Remembers up to ``slots`` keys that went, besides those that are here.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._gone_once: OrderedDict[bytes, None] = OrderedDict()
        self._gone_again: OrderedDict[bytes, None] = OrderedDict()
        self._once_share = 0.0
        """How many slots keys seen once should have."""
        self._returning: set[bytes] = set()

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        self.use([key for key in chain if key in self._once or key in self._again])
        for key in chain:
            self._learn(key)

    def end_chain(self, added: Sequence[bytes]) -> None:
        for key in reversed(added):
            (self._again if key in self._returning else self._once)[key] = None
        self._returning.clear()
        self._forget()

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._once.pop(key, None)
            self._again[key] = None
            self._again.move_to_end(key)

    def remove(self, key: bytes) -> None:
        if key in self._once:
            del self._once[key]
        else:
            del self._again[key]

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        chosen: list[bytes] = []
        while len(chosen) < count and (key := self._victim(spared)) is not None:
            chosen.append(key)
        return chosen

    def _victim(self, spared: Spared) -> bytes | None:
        first = self._once if len(self._once) > self._once_share else self._again
        for here in (first, self._again if first is self._once else self._once):
            key = _first(here, spared)
            if key is not None:
                del here[key]
                (self._gone_once if here is self._once else self._gone_again)[key] = None
                return key
        return None

    def _learn(self, key: bytes) -> None:
        """A key that went comes back: its list should have had more room."""
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            self._once_share = min(self._slots, self._once_share + max(1.0, again / once))
            del self._gone_once[key]
        elif key in self._gone_again:
            self._once_share = max(0.0, self._once_share - max(1.0, once / again))
            del self._gone_again[key]
        else:
            return
        self._returning.add(key)

    def _forget(self) -> None:
        while len(self._once) + len(self._gone_once) > self._slots and self._gone_once:
            self._gone_once.popitem(last=False)
        while len(self._gone_once) + len(self._gone_again) > self._slots:
            (self._gone_again or self._gone_once).popitem(last=False)


def _first(keys: Iterable[bytes], spared: Spared) -> bytes | None:
    return next((key for key in keys if not spared(key)), None)
