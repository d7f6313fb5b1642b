"""Transfer parameters in a prefill engine's answer: the engine's own text, or nothing at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvatlas.router.pd.transfer import NixlPull, expired_leases, without_blocks

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2], [2]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-r-1-0-9522eda8",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def answer(params: Any) -> bytes:
    return json.dumps({"id": "x", "choices": [{}], "kv_transfer_params": params}).encode()


def test_the_parameters_are_handed_over_as_they_were_written() -> None:
    text = b'{ "do_remote_prefill" :true,"remote_block_ids":[[1]],"remote_engine_id":"\\u0065",'
    text += b'"remote_request_id":"r","remote_host":"h","remote_port":1,"tp_size":1,"later":1.50}'
    assert NixlPull().read(b'{"choices":[],"kv_transfer_params":%b}' % text) == text


@pytest.mark.parametrize("body", [answer(None), b'{"choices":[]}'])
def test_an_engine_without_connector_hands_nothing_over(body: bytes) -> None:
    assert NixlPull().read(body) == "no connector"


@pytest.mark.parametrize("missing", sorted(PARAMS.keys() - {"do_remote_decode"}))
@pytest.mark.parametrize("instead", ["absent", None])
def test_parameters_that_would_end_a_decode_engine_are_not_handed_over(
    missing: str, instead: str | None
) -> None:
    params = {key: value for key, value in PARAMS.items() if key != missing}
    assert NixlPull().read(answer(params | ({} if instead else {missing: None}))) == "unreadable"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", answer([1]), answer("x"), answer(PARAMS)[:-9]])
def test_an_answer_that_cannot_be_read_hands_nothing_over(body: bytes) -> None:
    assert NixlPull().read(body) == "unreadable"


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("blocks", [[], [[]], [[1, 2, 3]], [[1], [], [2, 3]], [1, 2], None])
def test_an_answer_without_its_blocks_is_otherwise_the_same(blocks: Any, separators: Any) -> None:
    params = {**PARAMS, "remote_block_ids": blocks, "dcp_sizes": [[1]]}
    fields = {"kv_transfer_params": params, "choices": [[{"index": 0}]], "usage": {"prompt_tokens": 7}}
    read = json.loads(without_blocks(json.dumps(fields, separators=separators).encode()))
    nested = bool(blocks) and isinstance(blocks[0], list)
    assert read["kv_transfer_params"].pop("remote_block_ids") == ([] if nested else blocks)
    del params["remote_block_ids"]
    assert read == fields


def test_expired_leases_are_those_of_all_ranks_on_a_page_of_an_engine() -> None:
    page = b'vllm:nixl_num_kv_expired_reqs_total{engine="%d"} %d.0\n'
    first = b'vllm:num_requests_running{engine="0"} 1.0\n'
    assert expired_leases(first + page % (0, 2) + page % (1, 3)) == 5.0
    assert expired_leases(first) == 0.0
    assert expired_leases(page % (0, 2)) is None
