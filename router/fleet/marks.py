"""Marks of engines in large tables, so that an engine that leaves is gone from all of their entries at once.

A table by text, response or the like has 100,000 entries. Searching it for each engine that leaves would hold
the loop for seconds when a thousand leave together. So entries refer to the engine's mark, which says whether
it is still here; an engine that joins again under the same id gets another one. Entries of a mark that is no
longer here are dropped where they are met, and by the bound of their table.
"""

from __future__ import annotations

from weakref import WeakValueDictionary


class EngineMark:
    """One engine in a table; ``here`` until it is forgotten."""

    __slots__ = ("__weakref__", "engine_id", "here")

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.here = True


class EngineMarks:
    """Marks of one table. As many as the table has entries, at most."""

    def __init__(self) -> None:
        self._marks: WeakValueDictionary[str, EngineMark] = WeakValueDictionary()

    def of(self, engine_id: str) -> EngineMark:
        """Return the mark for new entries of this engine."""
        mark = self._marks.get(engine_id)
        if mark is None:
            mark = self._marks[engine_id] = EngineMark(engine_id)
        return mark

    def forget(self, engine_id: str) -> None:
        """Take the engine out of all entries."""
        mark = self._marks.pop(engine_id, None)
        if mark is not None:
            mark.here = False
