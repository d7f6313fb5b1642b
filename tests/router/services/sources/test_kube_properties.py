"""Any interleaving of events, lists, cuts and repeats ends in the right set of objects and engines."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.services.kubernetes.object_store import ObjectStore
from kvatlas.router.services.kubernetes.objects import Pod
from kvatlas.router.services.kubernetes.pool_engines import read_cluster
from tests.support.examples import examples
from tests.support.kube_objects import Json, pod

SETTINGS = KubernetesSettings(selector="app=vllm")
NAMES = ("a", "b", "c")


class Cluster:
    """The truth: objects by name, and every event that led to them."""

    def __init__(self) -> None:
        self.version = 0
        self.objects: dict[str, Json] = {}
        self.history: list[tuple[str, Json]] = []

    def change(self, name: str, kind: str, ip: int) -> None:
        self.version += 1
        known = self.objects.get(name)
        if kind == "delete":
            if known is None:
                return
            one = {**known, "metadata": {**known["metadata"], "resourceVersion": str(self.version)}}
            del self.objects[name]
            self.history.append(("DELETED", one))
            return
        uid = known["metadata"]["uid"] if known is not None else f"{name}-{self.version}"
        one = pod(name, f"10.0.0.{ip}", uid=uid, ready=kind != "unready", terminating=kind == "terminating")
        one["metadata"]["resourceVersion"] = str(self.version)
        self.objects[name] = one
        self.history.append(("MODIFIED" if known else "ADDED", one))


def hear(store: ObjectStore[Pod], event: tuple[str, Json]) -> None:
    sort, one = event
    decoded = msgspec.convert(one, Pod)
    if sort == "DELETED":
        store.delete(decoded)
    else:
        store.put(decoded)


changes = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(["ready", "unready", "terminating", "delete"]),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=25,
)


def expected(cluster: Cluster) -> dict[str, Json]:
    return dict(sorted(cluster.objects.items()))


def known(store: ObjectStore[Pod]) -> dict[str, Pod]:
    return {one.metadata.name: one for one in sorted(store, key=lambda one: one.metadata.name)}


@given(changes, st.integers(0, 25), st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_events_in_any_order_and_any_number_end_in_the_truth(
    steps: list[tuple[str, str, int]], listed_at: int, seed: int
) -> None:
    """A list at some version, then all later events shuffled and repeated, some earlier ones among them."""
    rng = random.Random(seed)
    cluster, store = Cluster(), ObjectStore[Pod]()
    for step in steps[:listed_at]:
        cluster.change(*step)
    store.replace([msgspec.convert(one, Pod) for one in cluster.objects.values()])
    at = cluster.version
    for step in steps[listed_at:]:
        cluster.change(*step)
    late = [e for e in cluster.history if int(e[1]["metadata"]["resourceVersion"]) > at]
    heard = late + rng.choices(late, k=len(late)) if late else []
    rng.shuffle(heard)
    for event in heard:
        hear(store, event)
    assert known(store) == {n: msgspec.convert(one, Pod) for n, one in expected(cluster).items()}
    assert len(store) == len(cluster.objects)
    wanted = read_cluster([msgspec.convert(o, Pod) for o in cluster.objects.values()], [], SETTINGS)
    assert read_cluster(store, [], SETTINGS) == wanted


@given(changes, st.integers(0, 2**32))
@settings(max_examples=examples(200))
def test_any_history_of_lists_watches_and_lost_tails_ends_in_the_truth(
    steps: list[tuple[str, str, int]], seed: int
) -> None:
    """As a reflector lives: receive some events, lose the rest, continue from the last one, or list again."""
    rng = random.Random(seed)
    cluster, store = Cluster(), ObjectStore[Pod]()
    at = 0

    def listing() -> int:
        store.replace([msgspec.convert(one, Pod) for one in cluster.objects.values()])
        return cluster.version

    def watch(from_version: int, *, whole: bool) -> int:
        for event in cluster.history:
            version = int(event[1]["metadata"]["resourceVersion"])
            if version > from_version:
                if not whole and rng.random() < 0.3:
                    break  # cut; what follows is heard by the next watch
                for _ in range(rng.choice((1, 1, 2))):
                    hear(store, event)
                from_version = version
        return from_version

    for step in steps:
        cluster.change(*step)
        action = rng.choice(("nothing", "watch", "list"))
        at = listing() if action == "list" else watch(at, whole=False) if action == "watch" else at
    watch(at, whole=True)
    assert known(store) == {n: msgspec.convert(one, Pod) for n, one in expected(cluster).items()}


def test_versions_that_are_no_numbers_count_in_the_order_of_arrival() -> None:
    store = ObjectStore[Pod]()
    for version in ("abc", "aaa"):
        one = pod("a", "10.0.0.1")
        one["metadata"]["resourceVersion"] = version
        assert store.put(msgspec.convert(one, Pod))
    assert [one.metadata.resource_version for one in store] == ["aaa"]


def test_memory_of_deleted_objects_is_bounded() -> None:
    store = ObjectStore[Pod]()
    for number in range(5000):
        one = pod(f"p{number}", "10.0.0.1")
        one["metadata"]["resourceVersion"] = str(number + 1)
        store.delete(msgspec.convert(one, Pod))
    assert len(store) == 0
    assert len(store._known) == len(store._deleted) == 4096
