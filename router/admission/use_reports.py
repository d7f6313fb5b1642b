"""Reports of a process to others about the use of its tenants; the others keep it in ``others_use``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvatlas.router.admission.others_use import Use, Uses


class UseReports:
    """Reports of one process; ``life`` grows with each start, ``uses`` gives the totals of the named tenants,
    or of all. A report has at most ``tenants_max`` of them; of more, each report has the next ones in turn.
    """

    def __init__(
        self, life: int, uses: Callable[[Collection[str] | None], Mapping[str, Use]], tenants_max: int
    ) -> None:
        self._life = life
        self._uses = uses
        self._tenants_max = tenants_max
        self._beat = 0
        self._turn = 0
        self.omitted = 0
        """Tenants left for the next report, of all reports."""

    def next(self, first: Collection[str] = (), *, all_tenants: bool) -> Uses:
        """Return a report with the tenants ``first``, and with the others too if ``all_tenants``."""
        found = dict(self._uses(first)) if first else {}
        whole = False
        if all_tenants:
            every = self._uses(None)
            whole = len(every) <= self._tenants_max
            self.omitted += max(0, len(every) - self._tenants_max)
            order = list(every)
            start = 0 if whole else self._turn % len(order)
            self._turn = start + self._tenants_max - len(found)
            for name in order[start:] + order[:start]:
                if len(found) >= self._tenants_max:
                    break
                found[name] = every[name]
        self._beat += 1
        return Uses(self._life, self._beat, whole, found)
