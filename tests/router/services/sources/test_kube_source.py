"""Engines in Kubernetes against an API server that does everything API servers do to their clients."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.services.kubernetes.pool_engines import DELETION_COST
from kvatlas.router.services.kubernetes.source import KubernetesSource
from tests.support.kube_api import PODS, SLICES, FakeKube, kube_api
from tests.support.kube_objects import endpoint, endpoint_slice, pod
from tests.support.pki import make_authority, make_certificate
from tests.support.seen_sources import Seeing, at_work
from tests.support.waiting import until

Told = dict[str, str]
COSTS_EVERY_S = "kvatlas.router.services.kubernetes.source._COSTS_EVERY_S"


@asynccontextmanager
async def seeing(
    kube: FakeKube, tmp_path: Path, *, costs: dict[str, int] | None = None, **changes: Any
) -> AsyncIterator[Seeing]:
    defaults: dict[str, Any] = {
        "selector": "app=vllm",
        "namespaces": ("serving",),
        "api": kube.url,
        "credentials_dir": str(tmp_path),
        "watch_s": 30.0,
    }
    settings = KubernetesSettings(**{**defaults, **changes})
    source = KubernetesSource(settings, costs=lambda: costs or {}, jitter=random.Random(7))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvatlas.router.services.kubernetes.reflector.RETRY_S_MAX", 0.2)
        async with at_work(Seeing(source)) as seen:
            yield seen


A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


async def test_pods_come_get_ready_leave_and_are_forgotten(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await seen.sees({})
        assert seen.source.stats.synced
        await kube.put(PODS, pod("a"))  # scheduled, no address yet
        await kube.put(PODS, pod("a", "10.0.0.1", ready=False))
        await seen.sees({A: "not ready"})
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.sees({A: ""})
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await kube.put(PODS, pod("other", "10.0.0.9", labels={"app": "web"}))
        await kube.put(PODS, pod("elsewhere", "10.0.0.8", namespace="default"))
        await seen.sees({A: "", B: ""})
        await kube.put(PODS, pod("a", "10.0.0.1", terminating=True))
        await seen.sees({A: "terminating", B: ""})
        await kube.delete(PODS, "a")
        await seen.sees({B: ""})
        assert kube.lists == 1
        assert not seen.source.stats.failing


async def test_a_list_of_many_pages_begun_again_when_a_page_expires(tmp_path: Path) -> None:
    async with kube_api() as kube:
        kube.page, kube.expired_pages = 3, 1
        for number in range(10):
            await kube.put(PODS, pod(f"p{number}", f"10.0.1.{number}"))
        async with seeing(kube, tmp_path) as seen:
            await seen.sees({f"http://10.0.1.{n}:8000": "" for n in range(10)})
            assert seen.told == [seen.now]  # never a part of it


async def test_history_that_is_gone_is_listed_again(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.sees({A: ""})
        lists = kube.lists
        await kube.delete(PODS, "a")
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await kube.compact()
        await seen.sees({B: ""})
        await seen.until(lambda: kube.lists > lists, "listed again")
        assert not seen.source.stats.failing  # daily business


async def test_a_gone_status_instead_of_a_watch_is_listed_again(tmp_path: Path) -> None:
    async with kube_api() as kube:
        kube.fail(410, watch_only=True)
        async with seeing(kube, tmp_path) as seen:
            await seen.until(lambda: kube.lists >= 2, "listed again")
            await kube.put(PODS, pod("a", "10.0.0.1"))
            await seen.sees({A: ""})


async def test_a_bookmark_moves_the_place_to_go_on_from(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path, watch_s=1.0) as seen:
        await seen.sees({})
        watches = kube.watches
        for number in range(3):  # changes of others, which this watch is not told of
            await kube.put(PODS, pod(f"w{number}", "10.0.9.9", labels={"app": "web"}))
        before = kube.version
        await seen.until(lambda: kube.watches > watches, "a second watch")
        kube._compacted = before  # only from the bookmark's version on
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.sees({A: ""})
        assert kube.lists == 1


async def test_a_connection_cut_in_the_middle_of_a_line_loses_nothing(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await seen.sees({})
        kube.cut_lines = 3
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await seen.sees({A: "", B: ""})
        assert seen.source.stats.errors["connection"] >= 1


async def test_the_api_server_restarts(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.sees({A: ""})
        await kube.stop()
        await seen.until(lambda: seen.source.stats.failing, "the failure is seen")
        assert seen.now == {A: ""}  # what was known stays
        await seen.until(lambda: "127.0.0.1" in seen.source.stats.last_error, "who is away")
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await kube.start()
        await seen.sees({A: "", B: ""})
        await seen.until(lambda: not seen.source.stats.failing, "recovered")


async def test_a_connection_that_died_unnoticed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.services.kubernetes.reflector._SILENCE_S", 0.1)

    async with kube_api() as kube:
        kube.dumb = 1
        async with seeing(kube, tmp_path, watch_s=1.0) as seen:
            await seen.sees({})
            await kube.put(PODS, pod("a", "10.0.0.1"))
            await seen.sees({A: ""})
            assert kube.lists == 1
            assert seen.source.stats.errors == {"connection": 1}


@pytest.mark.parametrize(
    ("status", "reason"), [(429, "throttled"), (500, "server_error"), (503, "server_error")]
)
async def test_refusals_are_waited_out_and_counted(tmp_path: Path, status: int, reason: str) -> None:
    async with kube_api() as kube:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        kube.fail(status, times=4)
        async with seeing(kube, tmp_path) as seen:
            await seen.sees({A: ""})
            assert seen.source.stats.errors == {reason: 4}
            assert f"status {status}; injected by the test" in seen.source.stats.last_error
            assert not seen.source.stats.failing


async def test_retry_after_is_respected(tmp_path: Path) -> None:
    async with kube_api() as kube:
        kube.fail(429, retry_after="1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with seeing(kube, tmp_path) as seen:
            await seen.until(lambda: kube.lists == 1, "asked again")
            assert loop.time() - began >= 1.0


async def test_without_rights_it_says_which(tmp_path: Path) -> None:
    async with kube_api() as kube:
        kube.fail(403, times=10**6)
        async with seeing(kube, tmp_path) as seen:
            await seen.until(lambda: "forbidden" in seen.source.stats.errors, "refused")
            text = seen.source.stats.last_error
            assert "/api/v1/namespaces/serving/pods" in text
            assert "get, list and watch" in text
            assert not seen.source.stats.synced
            kube.faults.clear()
            await seen.sees({})


async def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old-token\n")
    async with kube_api() as kube:
        kube.tokens = {"old-token"}
        async with seeing(kube, tmp_path) as seen:
            await kube.put(PODS, pod("a", "10.0.0.1"))
            await seen.sees({A: ""})
            kube.tokens = {"new-token"}
            await kube.cut()
            await seen.until(lambda: "unauthorized" in seen.source.stats.errors, "refused")
            token.write_text("new-token\n")
            await kube.put(PODS, pod("b", "10.0.0.2"))
            await seen.sees({A: "", B: ""})
            assert kube.seen_tokens[-1] == "new-token"


async def test_events_twice_and_old_ones_change_nothing(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        kube.repeat = 3
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await kube.delete(PODS, "a")
        await seen.sees({B: ""})
        kube._history.reverse()  # as from a cache that lags behind and mixes things up
        await kube.cut()
        await kube.put(PODS, pod("c", "10.0.0.3"))
        await seen.sees({B: "", "http://10.0.0.3:8000": ""})


async def test_an_object_that_is_not_understood_costs_only_itself(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await seen.sees({})
        broken = pod("a", "10.0.0.1")
        broken["metadata"]["annotations"] = "text"
        await kube.put(PODS, broken)
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await seen.sees({B: ""})
        assert seen.source.stats.refused == 1
        assert kube.lists == 1


async def test_text_with_other_ends_of_lines_does_not_break_a_watch(tmp_path: Path) -> None:
    """Python takes U+0085 and two more for the end of a line; the API server sends them as they are."""

    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await seen.sees({})
        kube.ascii = False
        await kube.put(PODS, pod("a", "10.0.0.1", annotations={"note": "one\x85two\u2028three\u2029"}))
        await seen.sees({A: ""})
        assert seen.source.stats.errors == {}


async def test_any_selector_is_passed_on_as_it_is_written(tmp_path: Path) -> None:
    async with kube_api() as kube:
        selector = "app in (vllm,sglang),tier!=test,!legacy"
        async with seeing(kube, tmp_path, selector=selector):
            await until(lambda: kube.watches > 0, "a watch")
        assert kube.selectors == {selector}


async def test_watches_that_end_immediately_are_spaced_out(tmp_path: Path) -> None:
    async with kube_api() as kube:
        kube.brief = 3
        async with seeing(kube, tmp_path) as seen:
            await seen.until(lambda: kube.watches == 4, "four watches")
            await kube.put(PODS, pod("a", "10.0.0.1"))
            await seen.sees({A: ""})
            assert kube.begun_s[3] - kube.begun_s[0] >= 1.0  # three pauses of at least half a second
            assert kube.lists == 1


async def test_a_page_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.services.kubernetes.transport._PAGE_BYTES_MAX", 4000)

    async with kube_api() as kube:
        for number in range(10):
            await kube.put(PODS, pod(f"p{number}", f"10.0.1.{number}"))
        async with seeing(kube, tmp_path) as seen:
            await seen.until(lambda: "bad_answer" in seen.source.stats.errors, "refused")
            assert "a page is over 4000 bytes" in seen.source.stats.last_error


async def test_slices_say_when_a_pod_is_ready(tmp_path: Path) -> None:
    async with (
        kube_api() as kube,
        seeing(kube, tmp_path, service_selector="kubernetes.io/service-name=vllm") as seen,
    ):
        a, b = pod("a", "10.0.0.1"), pod("b", "10.0.0.2")
        await kube.put(PODS, a)
        await kube.put(PODS, b)
        await seen.sees({A: "in no EndpointSlice", B: "in no EndpointSlice"})
        await kube.put(SLICES, endpoint_slice("s1", [endpoint("10.0.0.1", of=a)]))
        await kube.put(SLICES, endpoint_slice("s2", [endpoint("10.0.0.2", of=b, ready=False)]))
        await seen.sees({A: "", B: "not ready"})
        await kube.put(SLICES, endpoint_slice("s2", [endpoint("10.0.0.2", of=b)]))
        await seen.sees({A: "", B: ""})
        await kube.put(
            SLICES, endpoint_slice("s1", [endpoint("10.0.0.1", of=a, ready=False, terminating=True)])
        )
        await seen.sees({A: "terminating", B: ""})
        await kube.delete(SLICES, "s1")
        await kube.delete(PODS, "a")
        await seen.sees({B: ""})


async def test_several_namespaces_and_one_of_them_closed(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path, namespaces=("serving", "more")) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(PODS, pod("b", "10.0.0.2", namespace="more"))
        await kube.put(PODS, pod("c", "10.0.0.3", namespace="third"))
        await seen.sees({A: "", B: ""})


async def test_all_namespaces(tmp_path: Path) -> None:
    async with kube_api() as kube, seeing(kube, tmp_path, namespaces=("*",)) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(PODS, pod("b", "10.0.0.2", namespace="more"))
        await seen.sees({A: "", B: ""})


async def test_its_own_namespace_where_none_is_given(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("mine\n")
    async with kube_api() as kube, seeing(kube, tmp_path, namespaces=()) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1", namespace="mine"))
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await seen.sees({A: ""})


async def test_too_many_objects_are_an_error_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.services.kubernetes.reflector.OBJECTS_MAX", 2)

    async with kube_api() as kube:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        async with seeing(kube, tmp_path) as seen:
            await seen.sees({A: ""})
            for number in range(3):
                await kube.put(PODS, pod(f"p{number}", f"10.0.1.{number}"))
            await seen.until(lambda: "bad_answer" in seen.source.stats.errors, "refused")
            await seen.until(lambda: "narrow the selector" in seen.source.stats.last_error, "named")


async def trouble(kube: FakeKube, rng: random.Random) -> None:
    """One thing that can go wrong, or just be unusual."""
    kind = rng.choice(("cut", "cut_line", "compact", "busy", "broken", "gone", "repeat", "restart"))
    if kind == "cut":
        await kube.cut()
    elif kind == "cut_line":
        kube.cut_lines = 1
    elif kind == "compact":
        await kube.compact()
    elif kind == "busy":
        kube.fail(429, times=2)
    elif kind == "broken":
        kube.fail(0)
    elif kind == "gone":
        kube.fail(410, watch_only=True)
    elif kind == "repeat":
        kube.repeat = rng.choice((1, 2))
    else:
        await kube.stop()
        await kube.start()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_on_the_way_the_right_engines_are_known_in_the_end(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)

    async with kube_api() as kube, seeing(kube, tmp_path, watch_s=1.0) as seen:
        alive: dict[str, str] = {}
        for _ in range(60):
            name = f"p{rng.randrange(8)}"
            held = rng.choice(("", "not ready", "terminating"))
            if name in alive and rng.random() < 0.3:
                await kube.delete(PODS, name)
                del alive[name]
            else:
                ready, going = held != "not ready", held == "terminating"
                await kube.put(PODS, pod(name, f"10.0.2.{name[1]}", ready=ready, terminating=going))
                alive[name] = held
            if rng.random() < 0.3:
                await trouble(kube, rng)
            await asyncio.sleep(rng.choice((0, 0, 0.01)))
        await seen.sees({f"http://10.0.2.{name[1]}:8000": held for name, held in alive.items()})


def certificates(folder: Path, *, old: bool = False) -> None:
    """An authority and a certificate of 127.0.0.1 by it."""
    make_authority(folder, old=old)
    make_certificate(folder, "server", subject="/CN=kube-apiserver", old=old)


@pytest.mark.real  # TLS
@pytest.mark.parametrize("old", [False, True], ids=["proper", "old"])
async def test_over_tls_with_the_clusters_authority(tmp_path: Path, old: bool) -> None:
    """Clusters live long: an authority without key usage serves as it does for kubectl."""
    certificates(tmp_path, old=old)
    (tmp_path / "token").write_text("t0ken")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")

    async with kube_api(context) as kube, seeing(kube, tmp_path) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.sees({A: ""})
        assert kube.seen_tokens[-1] == "t0ken"


@pytest.mark.real  # TLS
async def test_an_api_server_of_another_authority_is_not_trusted(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        certificates(folder)
    (other / "token").write_text("t0ken")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own / "server.crt", own / "server.key")

    async with kube_api(context) as kube, seeing(kube, other) as seen:
        await seen.until(lambda: "connection" in seen.source.stats.errors, "refused")
        assert "certificate" in seen.source.stats.last_error.lower()
        assert kube.seen_tokens == []  # nothing was sent there
        (own / "token").write_text("t0ken")
        (other / "ca.crt").write_bytes((own / "ca.crt").read_bytes())  # the authority is rotated
        await seen.sees({})


def cost_of(kube: FakeKube, name: str) -> str | None:
    cost: str | None = kube.get(PODS, name)["metadata"]["annotations"].get(DELETION_COST)
    return cost


async def test_costs_are_written_to_the_pods_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COSTS_EVERY_S, 0.02)
    costs = {A: 900, B: 50}
    async with kube_api() as kube, seeing(kube, tmp_path, costs=costs, deletion_costs=True) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await seen.sees({A: "", B: ""})
        await seen.until(lambda: cost_of(kube, "a") == "900", "the cost of a")
        await kube.put(PODS, pod("a", "10.0.0.1", uid="another"))  # without an annotation
        await seen.until(lambda: cost_of(kube, "a") == "900", "the cost of the next a")
        costs[B] = 700
        await seen.until(lambda: cost_of(kube, "b") == "700", "the cost of b")
        assert [name for name, _ in kube.patches] == ["a", "a", "b"]
        await seen.until(lambda: seen.source.stats.deletion_costs_written == 3, "all are counted")
        assert seen.told[-1] == {A: "", B: ""}


async def test_refused_costs_are_counted_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COSTS_EVERY_S, 0.02)
    async with kube_api() as kube, seeing(kube, tmp_path, costs={A: 900}, deletion_costs=True) as seen:
        kube.refused_patches = 2
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.until(lambda: cost_of(kube, "a") == "900", "the cost of a")
        assert seen.source.stats.errors == {"deletion_cost": 2}
        assert "PATCH /api/v1/namespaces/serving/pods/a" in seen.source.stats.last_error
        assert "needs patch here" in seen.source.stats.last_error
        assert not seen.source.stats.failing  # its list is as good as before


async def test_no_pod_is_written_without_being_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COSTS_EVERY_S, 0.001)
    async with kube_api() as kube, seeing(kube, tmp_path, costs={A: 900}) as seen:
        await kube.put(PODS, pod("a", "10.0.0.1"))
        await seen.sees({A: ""})
        await kube.put(PODS, pod("b", "10.0.0.2"))
        await seen.sees({A: "", B: ""})
        assert not kube.patches
