"""Engines of an InferencePool: its selector and target ports, as they are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.services.kubernetes.objects import InferencePool, Pod
from kvatlas.router.services.kubernetes.pool_engines import read_cluster, read_pool
from tests.router.services.sources.test_kube_source import A, B, seeing
from tests.support.kube_api import PODS, POOLS, SLICES, kube_api
from tests.support.kube_objects import LABELS, endpoint, endpoint_slice, inference_pool, pod

BY_POOL: dict[str, Any] = {"selector": "", "inference_pool": "qwen"}
C = "http://10.0.0.3:8000"
NO_POOL = "there is no InferencePool qwen"


async def test_engines_follow_the_pool(tmp_path: Path) -> None:
    async with kube_api() as kube:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(PODS, pod("b", "10.0.0.2", labels={"app": "other"}))
        await kube.put(POOLS, inference_pool("qwen", LABELS, [8000]))
        await kube.put(POOLS, inference_pool("another", {"app": "other"}, [8000]))
        async with seeing(kube, tmp_path, **BY_POOL) as seen:
            await seen.sees({A: ""})
            await kube.put(PODS, pod("c", "10.0.0.3", ready=False))
            await seen.sees({A: "", C: "not ready"})
            await kube.put(POOLS, inference_pool("qwen", LABELS, [9000]))
            await seen.sees({"http://10.0.0.1:9000": "", "http://10.0.0.3:9000": "not ready"})
            await kube.put(POOLS, inference_pool("qwen", {"app": "other"}, [8000]))
            await seen.sees({B: ""})
            await kube.put(PODS, pod("a", "10.0.0.1", ready=False))  # of the selector before
            await kube.put(PODS, pod("b", "10.0.0.2", labels={"app": "other"}, terminating=True))
            await seen.sees({B: "terminating"})
            assert {} not in seen.told  # nor was there a moment without engines
            assert not seen.source.stats.failing


async def test_a_pool_that_is_not_there_has_no_engines(tmp_path: Path) -> None:
    async with kube_api() as kube:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        async with seeing(kube, tmp_path, **BY_POOL) as seen:
            await seen.sees({})
            assert seen.source.stats.synced
            assert seen.source.stats.last_error == NO_POOL
            await kube.put(POOLS, inference_pool("qwen", LABELS, [8000]))
            await seen.sees({A: ""})
            await kube.delete(POOLS, "qwen")
            await seen.sees({})
            assert seen.source.stats.errors == {"malformed": 2}


async def test_a_pool_whose_api_is_not_there_is_a_failure(tmp_path: Path) -> None:
    async with kube_api() as kube:
        kube.fail(404, times=3)
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(POOLS, inference_pool("qwen", LABELS, [8000]))
        async with seeing(kube, tmp_path, **BY_POOL) as seen:
            await seen.sees({A: ""})
            assert seen.told == [{A: ""}]  # nothing was told before
            assert seen.source.stats.errors == {"not_found": 3}
            assert "InferencePool in serving" in seen.source.stats.last_error


async def test_a_pool_that_says_nothing_of_use_changes_nothing(tmp_path: Path) -> None:
    async with kube_api() as kube:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(POOLS, inference_pool("qwen", LABELS, [8000]))
        async with seeing(kube, tmp_path, **BY_POOL) as seen:
            await seen.sees({A: ""})
            await kube.put(POOLS, inference_pool("qwen", {}, [8000]))
            await seen.until(lambda: "malformed" in seen.source.stats.errors, "it is reported")
            await kube.put(PODS, pod("b", "10.0.0.2"))
            await seen.sees({A: "", B: ""})


async def test_slices_say_which_pods_of_a_pool_are_ready(tmp_path: Path) -> None:
    async with kube_api() as kube:
        one = pod("a", "10.0.0.1")
        await kube.put(PODS, one)
        await kube.put(POOLS, inference_pool("qwen", LABELS, [8000]))
        by = {**BY_POOL, "service_selector": "kubernetes.io/service-name=vllm"}
        async with seeing(kube, tmp_path, **by) as seen:
            await seen.sees({A: "in no EndpointSlice"})
            await kube.put(SLICES, endpoint_slice("s", [endpoint("10.0.0.1", of=one)]))
            await seen.sees({A: ""})


def engines(ports: list[int], **annotations: str) -> list[EngineAddress]:
    marks = {f"kvatlas.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    one = msgspec.convert(pod("a", "10.0.0.1", ports={"kv-events": 5557}, annotations=marks), Pod)
    pool = msgspec.convert(inference_pool("qwen", LABELS, ports), InferencePool)
    view = read_pool([pool], "qwen")
    assert view is not None
    assert view.selector == "app=vllm"
    settings = KubernetesSettings(inference_pool="qwen")
    return [found.engine for found in read_cluster([one], [], settings, view.ports).discovered]


def test_each_target_port_is_a_rank_with_events_of_its_own() -> None:
    assert engines([8000, 8001]) == [
        EngineAddress("http://10.0.0.1:8000", events="tcp://10.0.0.1:5557"),
        EngineAddress("http://10.0.0.1:8001", events="tcp://10.0.0.1:5558"),
    ]


def test_ranks_behind_one_target_port_are_distinguished_by_a_header() -> None:
    assert engines([8000], data_parallel_size="2", port="9999") == [
        EngineAddress("http://10.0.0.1:8000", 0, "tcp://10.0.0.1:5557"),
        EngineAddress("http://10.0.0.1:8000", 1, "tcp://10.0.0.1:5558"),
    ]


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"selector": "app=vllm"}, "inference_pool: it has a selector of its own"),
        ({"namespaces": ("a", "b")}, "namespaces: an inference_pool is in one namespace"),
        ({"namespaces": ("*",)}, "namespaces: an inference_pool is in one namespace"),
        ({"inference_pool": "Qwen_3"}, "inference_pool: 'Qwen_3' is not the name of an object"),
    ],
)
def test_settings_that_contradict_a_pool(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        KubernetesSettings(**{"inference_pool": "qwen", **settings})
