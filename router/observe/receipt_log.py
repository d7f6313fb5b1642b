"""The latest receipts of all engines, for pages and searches by request id."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvatlas.router.observe.cache_funnel import CacheFunnel
from kvatlas.router.observe.receipts import Receipt

# Found by request id; pages show the latest few.
RECEIPTS_KEPT = 4096


class ReceiptLog:
    """The latest receipts of this router, of all engines."""

    def __init__(self) -> None:
        self.latest: deque[Receipt] = deque(maxlen=RECEIPTS_KEPT)
        self.funnel = CacheFunnel()
        self.listener: Callable[[Receipt], None] | None = None
        """Called with every receipt."""

    def add(self, receipt: Receipt) -> None:
        """Keep one receipt."""
        self.latest.append(receipt)
        self.funnel.add(receipt)
        if self.listener is not None:
            self.listener(receipt)
