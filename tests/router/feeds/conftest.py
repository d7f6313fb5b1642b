"""A ZMQ context and a recording sink for each test of a feed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.router.feeds.feed_harness import RecordingSink


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """An own context, so that a socket left open shows as a hang at the end, not as luck."""
    with zmq.Context() as context:
        yield context


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()
