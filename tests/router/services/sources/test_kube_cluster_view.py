"""From pods and slices to engines: what each annotation, port and condition makes of one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.placement.pull import kv_source_of
from kvatlas.router.services.kubernetes.objects import EndpointSlice, Pod
from kvatlas.router.services.kubernetes.pool_engines import (
    DELETION_COST,
    ClusterView,
    changed_costs,
    read_cluster,
)
from tests.support.kube_objects import Json, endpoint, endpoint_slice, pod

PODS = KubernetesSettings(selector="app=vllm")
SLICES = KubernetesSettings(service_selector="app=vllm")
BOTH = KubernetesSettings(selector="app=vllm", service_selector="app=vllm")


def seen(
    pods: list[Json] | None = None, slices: list[Json] | None = None, settings: KubernetesSettings = PODS
) -> ClusterView:
    return read_cluster(
        [msgspec.convert(one, Pod) for one in pods or ()],
        [msgspec.convert(one, EndpointSlice) for one in slices or ()],
        settings,
    )


def engines(*args: Any, **more: Any) -> list[EngineAddress]:
    return [one.engine for one in seen(*args, **more).discovered]


def held(*args: Any, **more: Any) -> dict[str, str]:
    return {one.engine.engine_id: one.held for one in seen(*args, **more).discovered}


def with_notes(**notes: str) -> Json:
    annotations = {f"kvatlas.io/{name.replace('_', '-')}": value for name, value in notes.items()}
    return pod("a", "10.0.0.1", annotations=annotations)


@pytest.mark.parametrize(
    ("ports", "url"),
    [
        ({"http": 9000, "metrics": 1}, "http://10.0.0.1:9000"),
        ({"web": 7000}, "http://10.0.0.1:7000"),  # the only one there is
        ({"": 7001}, "http://10.0.0.1:7001"),
        ({"web": 7000, "metrics": 1}, "http://10.0.0.1:8000"),
        ({}, "http://10.0.0.1:8000"),
    ],
)
def test_the_http_port(ports: dict[str, int], url: str) -> None:
    assert engines([pod("a", "10.0.0.1", ports=ports)]) == [EngineAddress(url)]


def test_named_ports_tell_where_events_are() -> None:
    ports = {"http": 8000, "kv-events": 5557, "kv-replay": 5558}
    assert engines([pod("a", "10.0.0.1", ports=ports)]) == [
        EngineAddress("http://10.0.0.1:8000", None, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    ]
    renamed = KubernetesSettings(
        selector="a=b", port_name="api", events_port_name="zmq", replay_port_name="again"
    )
    ports = {"api": 1, "zmq": 2, "again": 3}
    assert engines([pod("a", "10.0.0.1", ports=ports)], settings=renamed) == [
        EngineAddress("http://10.0.0.1:1", None, "tcp://10.0.0.1:2", "tcp://10.0.0.1:3")
    ]


def test_annotations_win_over_ports() -> None:
    one = with_notes(port="81", events_port="82", replay_port="83", snapshot_port="84", topic="kv")
    one["spec"]["containers"][0]["ports"].append({"name": "kv-events", "containerPort": 5557})
    ip = "tcp://10.0.0.1"
    assert engines([one]) == [
        EngineAddress("http://10.0.0.1:81", None, f"{ip}:82", f"{ip}:83", "kv", f"{ip}:84")
    ]


def test_a_pod_names_the_port_of_its_p2p_tier() -> None:
    (one,) = engines([with_notes(kv_source_port="7777")])
    assert one.kv_source == "10.0.0.1:7777"
    assert kv_source_of(one, 5710) == ("10.0.0.1", 7777)
    ranks = engines([with_notes(kv_source_port="7777", data_parallel_size="2")])
    assert [kv_source_of(rank, 5710)[1] for rank in ranks] == [7777, 7778]
    assert kv_source_of(EngineAddress("http://[fd00::1]:8000", 2), 5710) == ("fd00::1", 5712)


def test_a_pod_names_its_software() -> None:
    (one,) = engines([with_notes(kind="sglang")])
    assert one.kind == "sglang"


def test_a_replay_port_without_events_has_nothing_to_complete() -> None:
    assert engines([with_notes(replay_port="83")]) == [EngineAddress("http://10.0.0.1:8000")]


def test_every_data_parallel_rank_is_an_engine_with_ports_of_its_own() -> None:
    one = with_notes(data_parallel_size="3", events_port="5557", replay_port="6557")
    assert engines([one]) == [
        EngineAddress(
            "http://10.0.0.1:8000", rank, f"tcp://10.0.0.1:{5557 + rank}", f"tcp://10.0.0.1:{6557 + rank}"
        )
        for rank in range(3)
    ]
    assert engines([with_notes(data_parallel_size="1")]) == [EngineAddress("http://10.0.0.1:8000")]


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        ({"events_port": "http"}, "kvatlas.io/events-port = 'http' is not 1 to 65535"),
        ({"port": "0"}, "kvatlas.io/port = '0'"),
        ({"port": "70000"}, "kvatlas.io/port = '70000'"),
        ({"port": "²"}, "kvatlas.io/port = '²'"),
        ({"data_parallel_size": "5000"}, "kvatlas.io/data-parallel-size = '5000' is not 1 to 1024"),
        ({"data_parallel_size": "100", "events_port": "65500"}, "reach beyond 65535"),
        ({"kind": "tgi"}, "kvatlas.io/kind = 'tgi' is none of vllm, sglang"),
    ],
)
def test_invalid_annotations_are_logged_and_count_as_not_given(notes: dict[str, str], told: str) -> None:
    found = seen([with_notes(**notes)])
    assert len(found.problems) == 1
    assert found.problems[0].startswith("serving/a: ")
    assert told in found.problems[0]
    assert found.discovered[0].engine.base_url == "http://10.0.0.1:8000"
    assert found.discovered[0].engine.events is None


def test_pods_that_are_no_engines() -> None:
    assert engines([pod("a"), with_notes(ignore="true")]) == []
    assert engines([pod("a", "10.0.0.1", phase=phase) for phase in ("Succeeded", "Failed")]) == []


def test_why_a_pod_gets_no_new_requests() -> None:
    url = "http://10.0.0.1:8000"
    assert held([pod("a", "10.0.0.1")]) == {url: ""}
    assert held([pod("a", "10.0.0.1", ready=False)]) == {url: "not ready"}
    assert held([pod("a", "10.0.0.1", terminating=True)]) == {url: "terminating"}
    assert [one.ends_s for one in seen([pod("a", "10.0.0.1", terminating=True)]).discovered] == [
        datetime(2026, 11, 21, 9, 14, 32, tzinfo=UTC).timestamp()
    ]
    unread = pod("a", "10.0.0.1", terminating=True)
    unread["metadata"]["deletionTimestamp"] = "soon"
    assert [(one.held, one.ends_s) for one in seen([unread]).discovered] == [("terminating", None)]
    assert held([with_notes(drain="true")]) == {url: "drained by annotation"}
    assert held([with_notes(drain="false")]) == {url: ""}
    unknown = pod("a", "10.0.0.1")
    unknown["status"]["conditions"] = None
    assert held([unknown]) == {url: "not ready"}


def test_ipv6() -> None:
    one = pod("a", "fd00::7", ports={"http": 8000, "kv-events": 5557})
    assert engines([one]) == [EngineAddress("http://[fd00::7]:8000", None, "tcp://[fd00::7]:5557")]


def test_an_address_given_out_again_belongs_to_the_pod_that_stays() -> None:
    old = pod("a", "10.0.0.1", terminating=True)
    new = pod("b", "10.0.0.1", ready=False)
    for pods in ([old, new], [new, old]):
        (one,) = seen(pods).discovered
        assert (one.identity, one.held) == ("uid-b", "not ready")


def test_slices_alone_make_every_endpoint_an_engine() -> None:
    a = pod("a", "10.0.0.1")
    one = endpoint_slice(
        "s",
        [
            endpoint("10.0.0.1", of=a),
            endpoint("10.0.0.2", ready=None),
            endpoint("10.0.0.3", ready=False),
            endpoint("10.0.0.4", ready=False, terminating=True),
        ],
        ports={"http": 8001, "kv-events": 5557},
    )
    found = seen([], [one], SLICES)
    assert [(s.engine.base_url, s.held, s.identity) for s in found.discovered] == [
        ("http://10.0.0.1:8001", "", "uid-a"),
        ("http://10.0.0.2:8001", "", ""),
        ("http://10.0.0.3:8001", "not ready", ""),
        ("http://10.0.0.4:8001", "terminating", ""),
    ]
    assert found.discovered[0].engine.events == "tcp://10.0.0.1:5557"


def test_an_endpoint_in_two_slices_is_one_engine_and_ready_if_either_says_so() -> None:
    old = endpoint_slice("s1", [endpoint("10.0.0.1", ready=False)])
    new = endpoint_slice("s2", [endpoint("10.0.0.1")])
    for slices in ([old, new], [new, old]):
        assert held([], slices, settings=SLICES) == {"http://10.0.0.1:8000": ""}


def test_a_pod_with_two_addresses_is_one_engine() -> None:
    a = pod("a", "10.0.0.1")
    four = endpoint_slice("s4", [endpoint("10.0.0.1", of=a)])
    six = endpoint_slice("a6", [endpoint("fd00::1", of=a)], address_type="IPv6")
    assert engines([], [six, four], settings=SLICES) == [EngineAddress("http://10.0.0.1:8000")]
    assert engines([], [endpoint_slice("f", [endpoint("a.example")], address_type="FQDN")], SLICES) == []


def test_pods_and_slices_complete_each_other() -> None:
    a = pod("a", "10.0.0.1", ports={}, annotations={"kvatlas.io/events-port": "5557"})
    one = endpoint_slice("s", [endpoint("10.0.0.1", of=a), endpoint("10.9.9.9")], ports={"http": 8123})
    assert engines([a], [one], BOTH) == [
        EngineAddress("http://10.0.0.1:8123", None, "tcp://10.0.0.1:5557"),
        EngineAddress("http://10.9.9.9:8123"),
    ]
    assert held([a], [], settings=BOTH) == {"http://10.0.0.1:8000": "in no EndpointSlice"}
    assert engines([], [endpoint_slice("s", [endpoint("10.0.0.1", of=a)])], BOTH) == []  # no such pod (yet)


def test_a_slice_about_an_earlier_pod_of_the_name_counts_for_nothing() -> None:
    old, new = pod("vllm-0", "10.0.0.1", uid="old"), pod("vllm-0", "10.0.0.5", uid="new")
    stale = endpoint_slice("s", [endpoint("10.0.0.1", of=old)])
    assert held([new], [stale], settings=BOTH) == {"http://10.0.0.5:8000": "in no EndpointSlice"}


WORDS = st.sampled_from(["", "3", "-1", "true", "http", "70000", "²", "5 5", "000000001"])
PORTS = st.dictionaries(st.sampled_from(["http", "kv-events", "", "x"]), st.integers(1, 9))
NOTES = st.dictionaries(
    st.sampled_from([f"kvatlas.io/{key}" for key in ("port", "events-port", "data-parallel-size")]), WORDS
)


@given(st.data())
def test_whatever_the_objects_say_it_makes_a_picture(data: st.DataObject) -> None:
    """An object that decodes at all can be seen; ids are unique and the order of objects does not matter."""
    pods = []
    for number in range(data.draw(st.integers(0, 4))):
        one = pod(
            f"p{data.draw(st.integers(0, 2))}",
            data.draw(st.sampled_from(["", "10.0.0.1", "10.0.0.2", "fd00::1"])),
            uid=f"u{number}",
            ready=data.draw(st.booleans()),
            terminating=data.draw(st.booleans()),
            ports=data.draw(PORTS),
            annotations=data.draw(NOTES),
        )
        pods.append(one)
    slices = [
        endpoint_slice(f"s{n}", [endpoint("10.0.0.1", of=data.draw(st.sampled_from([*pods, None])))])
        for n in range(data.draw(st.integers(0, 2)))
    ]
    chosen = data.draw(st.sampled_from([PODS, SLICES, BOTH]))
    found = seen(pods, slices, chosen)
    ids = [one.engine.engine_id for one in found.discovered]
    assert len(set(ids)) == len(ids)
    assert seen(pods[::-1], slices[::-1], chosen).discovered == found.discovered


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("prefill-decode", "both"),
        ("both", "both"),
        (None, None),
    ],
)
def test_the_label_of_llm_d_gives_a_pod_its_role(label: str | None, role: Any) -> None:
    labels = {"app": "vllm"} | ({} if label is None else {"llm-d.ai/role": label})
    assert [one.role for one in engines([pod("a", "10.0.0.1", labels=labels)])] == [role]


def test_a_pod_of_another_role_gets_no_requests() -> None:
    view = seen([pod("a", "10.0.0.1", labels={"llm-d.ai/role": "encode"})])
    assert [bool(one.held) for one in view.discovered] == [True]
    assert "llm-d.ai/role = 'encode'" in view.problems[0]


def costed(*before: str | None, costs: dict[str, int]) -> dict[str, int]:
    """Pods p0, p1, ... with these deletion costs, by name: the costs to write now."""
    pods = [
        pod(f"p{n}", f"10.0.0.{n}", annotations={} if cost is None else {DELETION_COST: cost})
        for n, cost in enumerate(before)
    ]
    by_url = {f"http://10.0.0.{n}:8000": costs[f"p{n}"] for n in range(len(before)) if f"p{n}" in costs}
    known = [msgspec.convert(one, Pod) for one in pods]
    found = changed_costs(known, seen(pods).discovered, by_url)
    return {one.metadata.name: cost for one, cost in found}


def test_a_pod_gets_the_cost_of_losing_its_engine() -> None:
    assert costed(None, "700", "5000", costs={"p0": 900, "p1": 2000}) == {"p0": 900, "p1": 2000}


def test_a_drained_engine_is_cheaper_than_every_other() -> None:
    assert costed("0", "-1", "-1", costs={"p0": -1, "p1": -1, "p2": 0}) == {"p0": -1, "p2": 0}


def test_a_cost_that_is_no_number_is_replaced() -> None:
    assert costed("much", costs={"p0": 900}) == {"p0": 900}


def test_servers_of_one_pod_are_lost_together_and_a_pod_that_goes_is_left_alone() -> None:
    one = pod("a", "10.0.0.1")
    servers = read_cluster([msgspec.convert(one, Pod)], [], PODS, (8000, 8001)).discovered
    costs = {"http://10.0.0.1:8000": 300, "http://10.0.0.1:8001": 400}
    assert [cost for _, cost in changed_costs([msgspec.convert(one, Pod)], servers, costs)] == [700]
    going = msgspec.convert(pod("a", "10.0.0.1", terminating=True), Pod)
    assert not list(changed_costs([going], servers, costs))


_COSTS = st.integers(0, 2000) | st.integers(0, 1 << 33)


@given(_COSTS, _COSTS)
def test_a_cost_is_written_once_and_only_if_it_changed_by_a_quarter(before: int, now: int) -> None:
    most = (1 << 31) - 1
    before = min(before, most)
    written = costed(str(before), costs={"p0": now}).get("p0")
    if written is None:
        now = min(now, most)
        assert abs(now - before) < max(100, 0.25 * max(before, now))
    else:
        assert written == min(now, most)
        assert abs(written - before) >= max(100, 0.25 * max(before, written))
        assert not costed(str(written), costs={"p0": now})
