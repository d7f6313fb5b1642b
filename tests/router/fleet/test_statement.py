"""An engine's statements of its own set-up: its metrics page, and ``/server_info`` where that is enabled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engine_metrics import read_gauges, read_pool_blocks, read_statement
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.statement import (
    SERVER_INFO,
    EngineStatement,
    PartPools,
    server_info_statement,
    sglang_engines,
)
from tests.router.fleet.misbehaving import HANG, page, watching
from tests.support.waiting import until

PAGE = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="544",effective_attention_block_size="544",engine="0",\
mamba_block_size="544",mamba_cache_mode="align",prefix_cache_retention_interval="None",\
prefix_match_unit="16",swa_bounded_replay="True"} 1.0
vllm:cache_config_info{block_size="16",effective_attention_block_size="None",engine="1",\
mamba_block_size="None",mamba_cache_mode="none",prefix_cache_retention_interval="0",\
swa_bounded_replay="False"} 1.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
"""
"""Labels as vLLM 0.32 writes them (``CacheConfig.metrics_info``); rank 1 is another kind of engine."""
INFO: dict[str, dict[str, Any]] = {
    "vllm_config": {
        "cache_config": {"effective_attention_block_size": 64, "mamba_cache_mode": "align"},
        "speculative_config": {"method": "eagle3", "disable_eagle_block_drop": False},
    }
}


def test_each_rank_states_its_own() -> None:
    first, second = (read_statement(PAGE, rank) for rank in (0, 1))
    assert first == EngineStatement(
        source="metrics",
        drafts=True,
        attention_block_size=544,
        block_size=544,
        mamba_cache_mode="align",
        mamba_block_size=544,
        retention_interval="dense",
        bounded_replay=True,
    )
    assert second == EngineStatement(
        source="metrics", drafts=False, block_size=16, retention_interval=0, bounded_replay=False
    )


@pytest.mark.parametrize(
    ("drafter", "keeps"),
    [
        ({"method": "dflash"}, False),
        ({"method": "dflash", "disable_lookahead_block_hashes": False}, True),
        ({"method": "eagle3", "disable_lookahead_block_hashes": False}, False),
        ({"method": "eagle3", "disable_eagle_block_drop": True}, True),
    ],
)
def test_which_drafters_keep_the_last_block(drafter: dict[str, Any], keeps: bool) -> None:
    """vLLM 0.33, which has the option about hashes, drops none for DFlash and DSpark."""
    config = INFO["vllm_config"] | {"speculative_config": drafter}
    stated = server_info_statement(msgspec.json.encode({"vllm_config": config}))
    assert stated is not None
    assert stated.keeps_last_block is keeps


@pytest.mark.parametrize(
    ("connector", "chunk"),
    [
        ("OffloadingConnector", {"blocks_per_chunk": 4}),
        ("OffloadingConnector", {"block_size": 64}),
        ("MultiConnector", {"connectors": [5, {"kv_connector": "NixlConnector"}, {"blocks_per_chunk": 4}]}),
        ("LMCacheConnectorV1", {"blocks_per_chunk": 4}),
        ("MultiConnector", {"connectors": None}),
    ],
)
def test_chunks_of_vllms_own_offloading(connector: str, chunk: dict[str, Any]) -> None:
    if isinstance(children := chunk.get("connectors"), list):
        children[-1] = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": children[-1]}
    config = {"kv_connector": connector, "kv_connector_extra_config": chunk}
    body = {"vllm_config": INFO["vllm_config"] | {"kv_transfer_config": config}}
    stated = server_info_statement(msgspec.json.encode(body))
    assert stated is not None
    known = connector == "OffloadingConnector" or isinstance(children, list)
    expected = ((None, 64) if "block_size" in chunk else (4, None)) if known else (None, None)
    assert (stated.blocks_per_chunk, stated.chunk_tokens) == expected


def test_counters_of_the_rust_frontend_prove_drafts_only_above_zero() -> None:
    page = b'vllm:spec_decode_num_drafts{engine="0"} %b\nvllm:num_requests_running{engine="0"} 0\n'
    assert read_statement(page % b"0", 0) is None
    assert read_statement(page % b"0.0", 0) is None
    assert read_statement(page % b"3", 0) == EngineStatement(source="metrics", drafts=True)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"vllm:num_requests_running 1.0\n",
        b'vllm:cache_config_info{effective_attention_block_size="\xff9e99"} 1.0\n',
        b'vllm:cache_config_info{effective_attention_block_size="99999999999999999999"} 1.0\n',
        b'vllm:cache_config_info{effective_attention_block_size="0",mamba_cache_mode="?"} 1.0\n',
        b'vllm:cache_config_info{effective_attention_block_size="\xc2\xb2"} 1.0\n',
    ],
)
def test_a_page_of_nonsense_states_no_size(text: bytes) -> None:
    stated = read_statement(text, None)
    assert stated is None or (stated.attention_block_size, stated.mamba_cache_mode) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 20_000,
        b'{"vllm_config": "VllmConfig(...)"}',
        b'{"vllm_config": {"cache_config": []}}',
        b'{"kv_events": {"block_size": 64}}',
    ],
)
def test_a_body_of_another_kind_states_nothing(body: bytes) -> None:
    assert server_info_statement(body) is None


def test_values_of_another_shape_are_left_out() -> None:
    cache = {"effective_attention_block_size": "64", "mamba_cache_mode": 1, "swa_bounded_replay": "yes"}
    body = {"vllm_config": {"cache_config": cache, "speculative_config": {"method": ["eagle"]}}}
    stated = server_info_statement(msgspec.json.encode(body))
    assert stated == EngineStatement(source="server_info", drafts=True)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (4096, 4096), (None, "dense"), (False, None), (-1, None), ("0", None)]
)
def test_server_info_states_ranks_and_retention(value: object, expected: object) -> None:
    cache = {"prefix_cache_retention_interval": value, "mamba_block_size": 64}
    parallel = {"decode_context_parallel_size": 4}
    stated = server_info_statement(
        msgspec.json.encode({"vllm_config": {"cache_config": cache, "parallel_config": parallel}})
    )
    assert stated is not None
    assert (stated.retention_interval, stated.mamba_block_size, stated.decode_ranks) == (expected, 64, 4)


async def test_server_info_is_asked_once_for_each_process() -> None:
    async with watching(answers={SERVER_INFO: INFO, "/metrics": page(PAGE)}) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up, "up")
        assert status.server_info is not None
        assert (status.server_info.method, status.server_info.attention_block_size) == ("eagle3", 64)
        await watch.until(lambda: status.stated is not None, "metrics")
        await watch.polls(count=4)
        assert watch.server.count(SERVER_INFO) == 1
        started = PAGE + b"process_start_time_seconds %d\n"
        watch.server.answers["/metrics"] = page(started % 100)
        await watch.until(lambda: status.started == 100, "started")
        watch.server.answers[SERVER_INFO] = None
        watch.server.answers["/metrics"] = page(started % 200)
        await watch.until(lambda: status.server_info is None, "forgotten with the process")


@pytest.mark.parametrize("answer", [None, page(b"{}", 403), b"", HANG, page(b"nonsense")])
async def test_without_server_info_an_engine_is_still_up(answer: object) -> None:
    async with watching(answers={SERVER_INFO: answer}) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up, "up")
        assert status.server_info is None


SGLANG_INFO = {
    "page_size": 16,
    "version": "0.5.23",
    "enable_cache_report": True,
    "speculative_algorithm": None,
    "internal_states": [{"memory_usage": {"token_capacity": 4096, "token_capacity_swa": None}}],
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 5600,
    },
}
SGLANG_PAGE = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 1.0
sglang:token_usage{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 0.5
sglang:num_pages{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 256.0
sglang:mamba_usage{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 0.0
sglang:mamba_evictable_tokens{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 0.0
"""


def test_an_sglang_server_states_its_ranks_and_page() -> None:
    stated = server_info_statement(msgspec.json.encode(SGLANG_INFO))
    assert stated is not None
    assert (stated.kind, stated.version, stated.attention_block_size) == ("sglang", "0.5.23", 16)
    assert not stated.other_attention
    assert sglang_engines("http://10.0.0.1:30000", stated.event_ports) == [
        EngineAddress(
            "http://10.0.0.1:30000", rank, f"tcp://10.0.0.1:{5557 + rank}", f"tcp://10.0.0.1:{5600 + rank}"
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "namespaced"),
    [
        ({}, False),
        ({"enable_lora": False, "kv_events_config": '{"publisher": "zmq", "format": "default"}'}, False),
        ({"enable_lora": True}, True),
        ({"kv_events_config": '{"publisher": "zmq", "format": "dynamo"}'}, True),
    ],
)
def test_whether_hashes_of_an_sglang_server_cover_what_no_event_tells(
    arguments: dict[str, object], namespaced: bool
) -> None:
    stated = server_info_statement(msgspec.json.encode(SGLANG_INFO | arguments))
    assert stated is not None
    assert stated.namespaced is namespaced


@pytest.mark.parametrize(
    "ports", [{"endpoint_port_base": 0}, {"endpoint_port_base": 65535, "dp_size": 2}, [], 1]
)
def test_ports_of_an_sglang_server_that_cannot_be_used(ports: object) -> None:
    stated = server_info_statement(msgspec.json.encode({**SGLANG_INFO, "kv_events": ports}))
    assert stated is not None
    assert stated.event_ports is None


def test_gauges_of_an_sglang_server() -> None:
    assert read_gauges(SGLANG_PAGE, 0) == {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.5,
    }
    assert read_gauges(SGLANG_PAGE, None)["num_requests_running"] == 5
    assert read_pool_blocks(SGLANG_PAGE, 0) == 256
    assert read_statement(SGLANG_PAGE, 0) is None
    idle = b"sglang:mamba_usage 0.0\nsglang:mamba_available_tokens 0.0\nsglang:mamba_evictable_tokens 8.0\n"
    for others in (b"sglang:max_total_num_tokens_swa 1024.0\n", idle):
        stated = read_statement(SGLANG_PAGE + others, 0)
        assert stated is not None
        assert stated.other_attention


@pytest.mark.parametrize(
    ("arguments", "other_attention", "store"),
    [
        ({"uses_mamba_radix_cache": False, "hicache_storage_backend": "file"}, False, ""),
        ({"uses_mamba_radix_cache": True}, True, ""),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, False, "file"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "<script>"}, False, "storage"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": None}, False, ""),
        ({"enable_lmcache": True}, False, "lmcache"),
        ({"enable_unified_cache_external_linker": True}, False, "unified_cache_external_linker"),
    ],
)
def test_caches_of_which_an_sglang_servers_events_say_nothing(
    arguments: dict[str, object], other_attention: bool, store: str
) -> None:
    stated = server_info_statement(msgspec.json.encode(SGLANG_INFO | arguments))
    assert stated is not None
    assert (stated.other_attention, stated.silent_store) == (other_attention, store)
    assert stated.has_unseen_caches == (other_attention or bool(store))


POOLED = {"memory_usage": {"token_capacity": 4096, "token_capacity_swa": 1024}, "chunked_prefill_size": 512}
STATES = {"memory_usage": {"token_capacity": 4096}, "max_mamba_cache_size": 40}


@pytest.mark.parametrize(
    ("arguments", "state", "pools"),
    [
        ({}, POOLED, PartPools(4096, window_tokens=1024, prefill_tokens=512)),
        ({"uses_mamba_radix_cache": True}, STATES, PartPools(4096, states=40, request_states=1)),
        (
            {"uses_mamba_radix_cache": True, "mamba_radix_cache_strategy": "auto"},
            STATES | {"mamba_radix_cache_strategy": "extra_buffer"},
            PartPools(4096, states=40, request_states=3),
        ),
        (
            {"uses_mamba_radix_cache": True, "mamba_radix_cache_strategy": "extra_buffer_lazy"},
            STATES,
            PartPools(4096, states=40, request_states=2),
        ),
        ({"uses_mamba_radix_cache": True}, STATES | POOLED, None),
        ({"uses_mamba_radix_cache": True}, STATES | {"mamba_max_states_per_path": 2}, None),
        ({"enable_hierarchical_cache": True}, POOLED, None),
        ({"enable_lmcache": True}, POOLED, None),
        ({"speculative_algorithm": "EAGLE"}, POOLED, None),
        ({}, {"memory_usage": {"token_capacity": -1, "token_capacity_swa": 1024}}, None),
        ({}, {"memory_usage": []}, None),
        ({}, 5, None),
    ],
)
def test_pools_of_an_sglang_server_whose_rules_can_be_followed(
    arguments: dict[str, object], state: object, pools: PartPools | None
) -> None:
    stated = server_info_statement(
        msgspec.json.encode(SGLANG_INFO | arguments | {"internal_states": [state]})
    )
    assert stated is not None
    assert stated.part_pools == pools


async def test_an_sglang_server_is_found_by_what_it_serves() -> None:
    async with watching() as watch:
        server, fleet = watch.server, watch.fleet
        card = {"id": "m", "owned_by": "sglang"}
        server.answers["/v1/models"] = {"object": "list", "data": [card]}
        server.answers[SERVER_INFO] = SGLANG_INFO
        await until(lambda: any(status.publishes_events for status in fleet), "found")
        await until(lambda: all(status.up for status in fleet), "up")
        assert [status.engine.dp_rank for status in fleet] == [0, 1]
        assert {(status.kind, status.frontend) for status in fleet} == {("sglang", "sglang")}
