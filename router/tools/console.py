"""Where tables are printed: as wide as the terminal, and whole where output goes into a file or a pipe."""

from __future__ import annotations

import os

from rich.console import Console

WIDTH_PIPED = 1000
"""Wider than any table here: nothing is folded for somebody who greps."""


def output_console() -> Console:
    """Standard output. ``COLUMNS`` in the environment sets another width."""
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(width=WIDTH_PIPED)
