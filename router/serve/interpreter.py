"""What a process that serves asks of its Python interpreter."""

from __future__ import annotations

import gc
import sys


def tame_garbage_collection() -> None:
    """Leave what was loaded out of every collection, and collect the rest less often.

    A request makes no reference cycles, so collections find next to nothing, and cost 8 % of the CPU at the
    interpreter's thresholds (measured with the load generator of benchmarks/proxy.py). What stays open is
    looked through twice: 50,000 objects at a time, those of 500 streams, hold the loop for 30 ms; a million
    would for 120 (benchmarks/streams.py).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 2000)


def share_the_interpreter() -> None:
    """Worker threads give way to the event loop after 1 ms, not 5."""
    sys.setswitchinterval(0.001)
