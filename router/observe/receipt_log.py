"""The latest receipts of all engines, for pages and searches by request id."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvatlas.router.observe.cache_funnel import CacheFunnel
from kvatlas.router.observe.receipts import KeptReceipt, Receipt

# Found by request id; pages show the latest few.
RECEIPTS_KEPT = 4096


class ReceiptLog:
    """The latest receipts of this router, of all engines, as they are kept."""

    def __init__(self) -> None:
        self.kept: deque[KeptReceipt] = deque(maxlen=RECEIPTS_KEPT)
        self.funnel = CacheFunnel()
        self.listener: Callable[[Receipt], None] | None = None
        """Called with every receipt."""

    def add(self, kept: KeptReceipt) -> None:
        """Keep one receipt."""
        self.kept.append(kept)
        self.funnel.add(kept)
        if self.listener is not None:
            self.listener(Receipt(*kept))

    @property
    def latest(self) -> list[Receipt]:
        """All that are kept, oldest first."""
        return [Receipt(*kept) for kept in self.kept]
