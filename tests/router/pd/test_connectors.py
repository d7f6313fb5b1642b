"""Parameters of two engines with Mooncake, or with offloading tiers: the name of the transfer, and where to
look for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvatlas.router.openai.members import at_once
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.pd.transfer import Connector, KvSource, PrefillHolder, connector_of
from tests.support.waiting import run

ENTRY = {"engine_id": "eng-p", "worker_addr": {"0": {"0": "tcp://10.0.0.1:17000"}}}
CUT = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": None}
SOURCE = PrefillHolder("http://10.0.0.1:8000")
NIXL = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
}


class Server:
    """A bootstrap server; ``page`` None: there is none."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []

    async def __call__(self, base_url: str) -> bytes:
        self.asked.append(base_url)
        if self.page is None:
            raise OSError("refused")
        return self.page if isinstance(self.page, bytes) else json.dumps(self.page).encode()


def told(connector: Connector, answer: Any, source: PrefillHolder = SOURCE) -> Any:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    found: list[Any] = []

    async def main() -> None:
        got = await connector.decode_params(body, "xfer-1", source)
        found.append(json.loads(got) if isinstance(got, bytes) else got)

    run(main())
    return found[0]


def mooncake(server: Server, port: int = 8998) -> Connector:
    return connector_of(PdSettings(connector="mooncake", mooncake_bootstrap_port=port), server)


def test_the_prefill_engine_gets_a_name_and_the_decode_engine_its_address() -> None:
    server = Server({"0": ENTRY})
    connector = mooncake(server)
    assert json.loads(connector.prefill_params("xfer-1")) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "xfer-1",
    }
    assert told(connector, CUT) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "xfer-1",
        "remote_engine_id": "eng-p",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
    }
    assert server.asked == ["http://10.0.0.1:8998"]


def test_a_restarted_engine_is_recognised_by_its_new_id() -> None:
    server = Server({"0": ENTRY})
    connector = mooncake(server)
    told(connector, CUT)
    server.page = {"0": {**ENTRY, "engine_id": "eng-q"}}
    assert told(connector, CUT)["remote_engine_id"] == "eng-q"


@pytest.mark.parametrize(
    ("url", "bootstrap"),
    [("http://[fd00::1]:8000", "http://[fd00::1]:9111"), ("http://p.svc:8000/base", "http://p.svc:9111")],
)
def test_the_bootstrap_server_is_beside_the_engine(url: str, bootstrap: str) -> None:
    server = Server({"0": ENTRY})
    assert told(mooncake(server, 9111), CUT, PrefillHolder(url))["remote_bootstrap_addr"] == bootstrap


@pytest.mark.parametrize(
    "answer",
    [{"choices": [{"finish_reason": "length"}]}, {"stop_reason": "max_tokens"}, {"status": "incomplete"}],
)
def test_every_api_says_that_its_length_ended_an_answer(answer: Any) -> None:
    assert told(mooncake(Server({"0": ENTRY})), answer)["transfer_id"] == "xfer-1"


@pytest.mark.parametrize(
    "answer",
    [{"choices": [{"finish_reason": "stop"}]}, {"stop_reason": "end_turn"}, {"status": "completed"}, {}],
)
def test_an_unfinished_prefill_is_not_kept_and_not_waited_for(answer: Any) -> None:
    assert told(mooncake(Server({"0": ENTRY})), answer) == "stopped"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (None, "no connector"),
        ({}, "no connector"),
        ({"0": {**ENTRY, "worker_addr": {}}}, "no connector"),
        (b"<html>", "unreadable"),
        ({"0": {"engine_id": 7}}, "unreadable"),
        ({"0": ENTRY, "1": ENTRY}, "ranks"),
    ],
)
def test_without_an_engine_to_name_nothing_is_handed_over(page: Any, why: str) -> None:
    assert told(mooncake(Server(page)), CUT) == why


def test_of_several_ranks_the_one_that_was_asked_is_named() -> None:
    server = Server({"0": ENTRY, "1": {**ENTRY, "engine_id": "second"}})
    connector = mooncake(server)
    assert told(connector, CUT, PrefillHolder("http://p:8000", "1"))["remote_engine_id"] == "second"
    assert told(connector, CUT, PrefillHolder("http://p:8000", "2")) == "no connector"


def test_which_connector_an_engine_has_its_answer_tells() -> None:
    server = Server({"0": ENTRY})
    connector = connector_of(PdSettings(), server)
    asked = json.loads(connector.prefill_params("xfer-1"))
    assert (asked["do_remote_decode"], asked["remote_block_ids"], asked["transfer_id"]) == (
        True,
        None,
        "xfer-1",
    )
    assert told(connector, {**CUT, "kv_transfer_params": NIXL}) == NIXL
    assert server.asked == []
    assert connector.leased(SOURCE)
    assert told(connector, CUT)["transfer_id"] == "xfer-1"
    assert not connector.leased(SOURCE)
    server.page = None
    assert told(connector, CUT) == "no connector"


def test_a_connector_that_is_configured_is_the_one() -> None:
    server = Server({"0": ENTRY})
    connector = connector_of(PdSettings(connector="nixl"), server)
    assert b"transfer_id" not in connector.prefill_params("xfer-1")
    assert told(connector, CUT) == "no connector"
    assert server.asked == []


@pytest.mark.parametrize(("rank", "port"), [("", 5710), ("0", 5710), ("2", 5712)])
def test_offloading_tiers_get_a_name_and_an_address(rank: str, port: int) -> None:
    server = Server(None)
    connector = connector_of(PdSettings(connector="offloading"), server)
    assert json.loads(connector.prefill_params("xfer-1")) == {"remote_decoder": {"kv_request_id": "xfer-1"}}
    assert told(connector, CUT, PrefillHolder("http://10.0.0.1:8000", rank)) == {
        "remote_prefiller": {"kv_request_id": "xfer-1", "remote_host": "10.0.0.1", "remote_port": port}
    }
    assert server.asked == []
    assert not connector.leased(SOURCE)


@pytest.mark.parametrize("name", ["mooncake_bootstrap_port", "offloading_port"])
def test_ports_are_ports(name: str) -> None:
    for port in (1, 65535):
        PdSettings(**{name: port})
    for port in (0, 65536):
        with pytest.raises(ValueError, match=name):
            PdSettings(**{name: port})


def test_an_engine_that_pulls_gets_the_source_and_every_other_byte_stays() -> None:
    text = b'{"model": "m", "prompt": "\\u00e9 \xc3\xa9", "top_p": 1.0, "top_p": 0.5}'
    body = at_once(split_body("/v1/completions", text))
    made = at_once(KvSource(body, "10.0.0.1", 5712).asked_with("xfer-1"))
    source = {"kv_request_id": "xfer-1", "remote_host": "10.0.0.1", "remote_port": 5712}
    assert json.loads(made)["kv_transfer_params"] == {"remote_kv_source": source}
    assert made.endswith(text[1:])
