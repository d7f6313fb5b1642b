"""How far a long reading of a capture has come, on a terminal; nothing anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from router.tools.capture.file import CapturedFrame

_EVERY_FRAMES = 256


def shown(frames: Iterable[CapturedFrame], label: str, *, quiet: bool) -> Iterator[CapturedFrame]:
    """The same frames, counted on the terminal that standard error is, if it is one and not ``quiet``."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    disable = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(label, total=None)
        for number, frame in enumerate(frames):
            if number % _EVERY_FRAMES == 0:
                progress.update(task, completed=number)
            yield frame
