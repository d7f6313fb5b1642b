"""Source of a workload: a trace, a capture of a running router, or a generator; one draw per seed.

Seed 0 is a file as recorded. Another seed shifts its arrivals: within their tick if times are rounded, else
by up to ``JITTER_GAPS`` mean gaps, which changes only which requests meet in a queue. A generator draws new
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from router.simulate.workload.generate import GENERATORS
from router.simulate.workload.requests import (
    Asked,
    Request,
    WorkloadError,
    by_time,
    continued,
    spread,
)
from router.simulate.workload.sessions import is_session, read_sessions
from router.simulate.workload.traces import asked_in, is_capture, read, read_capture

COUNT = 4000
SECONDS_PER_REQUEST = 0.3
JITTER_GAPS = 2.0


class WorkloadSource(msgspec.Struct, frozen=True, kw_only=True):
    """The workload to simulate. ``name``: a path, or one of ``GENERATORS``.

    ``requests_max``: maximum number of requests (generators: their number, by default ``COUNT``).
    ``seconds``: duration of a generator's arrivals. ``model``: only requests of that model, if a capture has
    several.
    """

    name: str
    requests_max: int | None = None
    seconds: float | None = None
    model: str | None = None

    def draws(self, seeds: Sequence[int]) -> dict[int, list[Request]]:
        """Return the requests per seed. Raises ``WorkloadError``."""
        if self.name in GENERATORS:
            return {seed: self._generated(seed) for seed in seeds}
        if self.seconds is not None:
            raise WorkloadError(f"--seconds is for {', '.join(GENERATORS)}; a file has its own times")
        asked = self._read()[: self.requests_max]
        return {seed: _jittered(continued(spread(asked, seed=seed)), asked, seed) for seed in seeds}

    def _generated(self, seed: int) -> list[Request]:
        count = COUNT if self.requests_max is None else self.requests_max
        seconds = SECONDS_PER_REQUEST * count if self.seconds is None else self.seconds
        return continued(GENERATORS[self.name](count, seconds, seed))

    def _read(self) -> list[Asked]:
        paths = [Path(self.name)]
        if not paths[0].exists():
            paths = [Path(word.strip()) for word in self.name.split(",")]
        path = paths[0]
        if not path.exists() and not path.suffix:
            made = ", ".join(GENERATORS)
            raise WorkloadError(f"{self.name}: neither a file nor one of {made}")
        if all(map(is_session, paths)) and self.model is None:
            return read_sessions(paths)
        if len(paths) > 1:
            raise WorkloadError(f"{self.name}: only session files (*.json, *.json.gz) can be several")
        if is_capture(path):
            return asked_in(read_capture(path, self.model))
        if self.model is not None:
            raise WorkloadError(f"{path}: requests of this format name no model")
        return read(path)


def _jittered(requests: list[Request], asked: Sequence[Asked], seed: int) -> list[Request]:
    in_ticks = [one.at_s for one in requests] != [one.at_s for one in asked]
    if seed == 0 or in_ticks or len(requests) < 2:
        return requests
    most_s = JITTER_GAPS * (requests[-1].at_s - requests[0].at_s) / len(requests)
    offsets = np.random.default_rng(seed).uniform(0.0, most_s, len(requests)).tolist()
    moved = [
        msgspec.structs.replace(one, at_s=one.at_s + offset)
        for one, offset in zip(requests, offsets, strict=True)
    ]
    return by_time(moved)
