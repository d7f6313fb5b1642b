"""Counts of requests, errors and 503s for the status page, and ids that name a request."""

from __future__ import annotations

from kvatlas.router.api.views import is_named, show_history
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.settings import ListenStats


def test_errors_are_5xx_broken_streams_and_refused_connections() -> None:
    router = Router(Config(engines=(EngineAddress("http://e:1"),)))
    try:
        router.listen_stats = ListenStats(connections_refused=20, bodies_refused=10)
        (interval,) = show_history(router.sources).intervals
        assert (interval.requests, interval.errors, interval.unavailable) == (20, 30, 30)
        assert (interval.exact, interval.compared) == (0, 0)
        statuses = {"200": 50, "404": 7, "429": 6, "client_gone": 5, "unseen": 4, "500": 3, "503": 2}
        router.proxy.requests.counts.update({("m", "", status): count for status, count in statuses.items()})
        router.proxy.requests.counts["m", "", "broken_stream"] = 1
        (interval,) = show_history(router.sources).intervals
        # A request whose body found no room is among those that ended; a refused connection is not.
        assert (interval.requests, interval.errors, interval.unavailable) == (78 + 20, 6 + 30, 2 + 30)
    finally:
        router.proxy.close()
        router.reader.close()


def test_an_id_its_beginning_and_the_engines_id_name_a_request() -> None:
    request_id = "0f9c2d7e81b34a55"
    for asked in (request_id, request_id[:4], f"chatcmpl-{request_id}", f"cmpl-{request_id}-0"):
        assert is_named(request_id, asked)
    assert not is_named(request_id, request_id[4:])
    assert not is_named("7", "chatcmpl-7"), "short ids of clients stand in many texts by chance"
    assert not is_named("", "anything")
