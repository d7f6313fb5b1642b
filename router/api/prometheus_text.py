"""The Prometheus text format of metric families, in steps between which other tasks may run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    pass


T = TypeVar("T")
# CPU time between two pauses of a page; the longest step takes one part of a family more.
_TURN_S = 0.0005


def page_steps(found: Iterable[Metric], *, pause_every_s: float = _TURN_S) -> Generator[None, None, bytes]:
    """Yield the steps that make the page of these families in Prometheus text format; each family is read in
    its step. Other tasks may run (``kvatlas.router.openai.members.run_cooperatively``) after the first step
    that ends this long after a pause."""
    name = ""

    def text(family: Metric) -> bytes:
        nonlocal name
        continued, name = family.name == name, family.name
        lines = "".join(map(_line, family.samples)).encode()
        # A further part of a family (``in_parts``) goes without HELP and TYPE lines.
        return lines if continued else generate_latest(_Empty(family)) + lines

    texts = yield from in_steps(text, found, pause_every_s=pause_every_s)
    return b"".join(texts)


def in_steps(
    work: Callable[[Metric], T], found: Iterable[Metric], *, pause_every_s: float = _TURN_S
) -> Generator[None, None, list[T]]:
    """Apply ``work`` to each family, in the same steps."""
    made: list[T] = []
    began_s = time.perf_counter()
    for family in found:
        made.append(work(family))
        if time.perf_counter() - began_s >= pause_every_s:
            yield
            began_s = time.perf_counter()
    return made


class _Empty(Collector):
    """A family without its samples."""

    def __init__(self, family: Metric) -> None:
        self._family = Metric(family.name, family.documentation, family.type)

    def collect(self) -> list[Metric]:
        return [self._family]


def _line(sample: Sample) -> str:
    """Return a sample's line as ``generate_latest`` writes it, in a third of its time: names are those of
    this package, which need no check."""
    value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
    if not sample.labels:
        return f"{sample.name} {value}\n"
    pairs = [f'{name}="{_escaped(text)}"' for name, text in sorted(sample.labels.items())]
    return f"{sample.name}{{{','.join(pairs)}}} {value}\n"


def _escaped(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text
