"""Text affinity: the longest known prefix per engine, bounded, and never stronger than load."""

from __future__ import annotations

from kvatlas.router.placement.affinity import AffinityMap, AffinitySettings, text_tokens
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.placement.cost import choose
from tests.router.placement.candidates import make_candidate


def test_longest_prefix_per_engine() -> None:
    affinity = AffinityMap()
    affinity.record([1, 2, 3], "a")
    affinity.record([1, 2, 30], "b")
    assert affinity.match([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert affinity.match([1, 9]) == {"a": 1, "b": 1}
    assert affinity.match([5]) == {}
    assert (affinity.stats.lookups, affinity.stats.matched) == (3, 2)


def test_a_key_remembers_its_latest_engines_only() -> None:
    affinity = AffinityMap(AffinitySettings(engines_max=2))
    for engine in ("a", "b", "a", "c"):
        affinity.record([1], engine)
    assert affinity.match([1]) == {"a": 1, "c": 1}
    three = AffinityMap(AffinitySettings(engines_max=3))
    for engine in ("b", "a", "c", "a"):  # coming again takes no second place
        three.record([1], engine)
    assert three.match([1]) == {"a": 1, "b": 1, "c": 1}
    single = AffinityMap(AffinitySettings(engines_max=1))
    single.record([1], "a")
    single.record([1], "b")
    assert single.match([1]) == {"b": 1}


def test_memory_is_bounded_and_loses_the_deep_end_first() -> None:
    affinity = AffinityMap(AffinitySettings(keys_max=3))
    affinity.record([1, 2, 3, 4], "a")
    assert len(affinity) == 3
    assert affinity.stats.evicted == 1
    assert affinity.match([1, 2, 3, 4]) == {"a": 3}


def test_forgetting_an_engine_leaves_the_others() -> None:
    affinity = AffinityMap()
    affinity.record([1, 2], "a")
    affinity.record([1], "b")
    affinity.forget("a")
    assert affinity.match([1, 2]) == {"b": 1}


def test_one_hot_text_does_not_flood_its_engine() -> None:
    """A hundred equal texts together, whose first went to one engine: load pushes the rest out."""
    affinity, knobs = AffinityMap(), PolicySettings()
    keys, prompt_tokens = list(range(40)), text_tokens(40, 800)
    assert prompt_tokens == 8000
    queues = dict.fromkeys("abcd", 0.0)
    for _ in range(100):
        known = affinity.match(keys)
        engines = [
            make_candidate(
                e, hit_tokens=(est := text_tokens(known.get(e, 0), 800)), shared_prefix_tokens=est, queue_s=q
            )
            for e, q in queues.items()
        ]
        choice = choose(engines, prompt_tokens, knobs, prompt_key=1)
        affinity.record(keys, choice.engine_id)
        queues[choice.engine_id] += 0.2  # the truth: every answer is slow whatever was believed
        saving_s = (1 + knobs.eviction_premium) * 1.0
        assert max(queues.values()) - min(queues.values()) <= saving_s + 0.2 + 1e-9  # and one prompt
    assert len({e for e, q in queues.items() if q}) == 4
