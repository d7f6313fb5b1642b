"""Kinds of worlds: how a seed becomes a plan.

Each kind is one function that changes the common draft: engines, configuration, what clients ask. Changing
anything here gives every seed another meaning, which is why found defects are kept as plans and not as seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.world.faults import BREAKS, REDIS_FAULTS, fitting
from tests.world.plan import OPENAI, PADDING_BYTES, ClientRequest, Fault, Plan

LAYOUTS = ("full", "full", "mla", "mla", "gemma", "gptoss", "mamba", "chunked")
"""Names of ``fleet.LAYOUTS``: what most models have comes first and most often."""
_PROBED_SHARE = 0.3
"""Of the worlds of each kind: engines that join are probed."""
_FAULT_S = 12.0
"""Faults begin within the time in which requests arrive."""


class Draft:
    """A plan in the making."""

    def __init__(self, seed: int, kind: str, *, requests: int, faults: bool) -> None:
        self.rng = rng = random.Random(seed * 7919 + 1)
        self.seed, self.kind, self.num_requests, self.with_faults = seed, kind, requests, faults
        self.layout = rng.choice(LAYOUTS)
        self.base: dict[str, Any] = {
            "groups": self.layout,
            "prefill_s_per_token": rng.choice((1e-6, 1e-5, 1e-4)),
            "decode_s_per_token": rng.choice((1e-3, 4e-3, 2e-2)),
            "num_blocks": rng.choice((256, 512, 4096)) * (4 if self.layout in {"gemma", "mamba"} else 1),
            "max_model_len": 1200,
            "max_num_batched_tokens": rng.choice((256, 2048)),
            "hash_algo": rng.choice(("sha256", "sha256_cbor")),
        }
        self.engines = [dict(self.base) for _ in range(rng.choice((2, 3, 4)))]
        self.spare: tuple[int, ...] = ()
        self.apis: tuple[str, ...] = ("chat", "chat", "completions", "tokens", "tokens")
        self.token_lengths: tuple[int, ...] = (100, 700)
        self.answer_tokens: tuple[int, ...] = (1, 5, 40)
        self.stream_share = 0.5
        self.config: dict[str, Any] = {}
        self.tenants: dict[str, dict[str, Any]] = {}
        self.callers: tuple[str, ...] = ("",)
        self.routers, self.gateway = 1, False
        self.fields: Callable[[], dict[str, str]] = dict
        self.body: Callable[[], dict[str, Any]] = dict
        self.fault_counts: tuple[int, ...] = (0, 1, 2, 4, 8)
        self.fault_kinds: tuple[str, ...] = ()
        """None: those that fit."""
        self.redis = False

    def each_engine(self, **changes: Any) -> None:
        for one in self.engines:
            one.update(changes)

    def plan(self) -> Plan:
        rng = self.rng
        dense = rng.choice((1.0, 1.0, 0.2))
        requests = tuple(self._request(dense) for _ in range(self.num_requests))
        faults = tuple(self._faults()) if self.with_faults else ()
        busy_s = rng.choice((0.0, 0.0, 0.0, 0.004))
        return Plan(
            seed=self.seed,
            kind=self.kind,
            engines=tuple(self.engines),
            spare=self.spare,
            requests=requests,
            faults=faults,
            routers=self.routers,
            config=self.config,
            tenants=self.tenants,
            gateway=self.gateway,
            busy_s=0.0 if self.redis else busy_s,  # look-ups in the index have milliseconds
        )

    def _request(self, dense: float) -> ClientRequest:
        rng = self.rng
        api: Any = rng.choice(self.apis)
        many = rng.random()
        leaves_s = rng.choice((None, None, None, None, 0.01, 0.05, 0.5, 3.0))
        return ClientRequest(
            at_s=round(rng.random() * 12 * dense, 3),
            client=rng.randrange(8),
            api=api,
            story=rng.randrange(6),
            length=rng.choice(self.token_lengths) if api == "tokens" else rng.choice((3, 12, 40)),
            turns=rng.choice((1, 1, 1, 3)) if many >= 0.1 else 1,
            stream=rng.random() < self.stream_share,
            answer_tokens=rng.choice(self.answer_tokens),
            prompts=3 if api == "tokens" and many < 0.1 else 1,
            answers=2 if api in OPENAI and many > 0.95 else 1,
            usage=rng.random() < 0.8,
            leaves_s=leaves_s,
            resets=leaves_s is not None and rng.random() < 0.5,
            slow=rng.random() < 0.1,
            padding_bytes=rng.choice((0, 0, 0, 0, PADDING_BYTES)),
            tenant=rng.choice(self.callers),
            router=rng.randrange(self.routers),
            fields=self.fields(),
            body=self.body(),
        )

    def _faults(self) -> list[Fault]:
        rng = self.rng
        kinds = self.fault_kinds or fitting(self)
        found = [
            Fault(
                at_s=round(0.5 + rng.random() * _FAULT_S, 3),
                kind=rng.choice(kinds),
                target=rng.randrange(len(self.engines)),
                lasts_s=rng.choice((0.05, 1.0, 4.0, 15.0, 70.0)),
                value=round(rng.random(), 3),
            )
            for _ in range(rng.choice(self.fault_counts))
        ]
        found += [
            Fault(at_s=round(0.5 + rng.random() * _FAULT_S, 3), kind="join", target=i, lasts_s=0.0)
            for i in self.spare
        ]
        if self.redis:
            found += [
                Fault(
                    at_s=round(0.5 + rng.random() * _FAULT_S, 3),
                    kind=rng.choice(REDIS_FAULTS),
                    target=rng.randrange(self.routers),
                    lasts_s=rng.choice((0.05, 1.0, 4.0, 15.0)),
                    value=round(rng.random(), 3),
                )
                for _ in range(rng.choice((0, 1, 2)))
            ]
        return found


def _plain(draft: Draft) -> None:
    rng = draft.rng
    if rng.random() < 0.25:
        draft.config["models"] = {"*": {"tokenizer": "off"}}
    if rng.random() < 0.2:
        draft.each_engine(host_blocks=600)


def _pd(draft: Draft) -> None:
    rng = draft.rng
    connector = rng.choice(("nixl", "mooncake", "offloading"))
    lease_s = rng.choice((12.0, 30.0))
    draft.layout = layout = rng.choice(("full", "full", "mla", "gptoss"))
    draft.each_engine(groups=layout, num_blocks=2048, kv_connector=connector, kv_lease_s=lease_s)
    prefills = max(1, len(draft.engines) // 2)
    for i, one in enumerate(draft.engines):
        one["role"] = "prefill" if i < prefills else "decode"
        one["kv_load_failure_policy"] = rng.choice(("fail", "recompute"))
        one["transfer_s_per_block"] = rng.choice((2e-5, 2e-3))
    draft.token_lengths = (200, 700, 700)
    draft.config["pd"] = {
        "connector": connector if connector == "offloading" else rng.choice(("auto", connector)),
        "lease_s": lease_s,
        "min_remote_tokens": 64,
        "leg_overhead_s": 0.0,
        "transfer_s_per_token": 0.0,
        "lease_margin_s": rng.choice((2.0, 10.0)),
    }
    if rng.random() < 0.4:
        draft.config["queue"] = {"saturation_s": 0.5}
        _with_tenants(draft)


def _with_tenants(draft: Draft) -> None:
    rng = draft.rng
    draft.tenants = {"ada": {"weight": rng.choice((1.0, 4.0))}, "eve": {}, "probe": {}}
    draft.callers = ("ada", "eve")


def _tenants(draft: Draft) -> None:
    rng = draft.rng
    draft.each_engine(prefill_s_per_token=1e-3)
    draft.config["queue"] = {"saturation_s": rng.choice((0.05, 0.5)), "wait_s_max": rng.choice((5.0, 60.0))}
    _with_tenants(draft)
    if rng.random() < 0.5:
        draft.config["keys"] = {"isolate": rng.choice(("tenant", "group"))}
    if rng.random() < 0.3:
        draft.tenants["eve"] |= {"uncached_tokens_per_minute": 6000, "concurrent_requests": 4}


def _pull(draft: Draft) -> None:
    draft.layout = layout = draft.rng.choice(("full", "full", "mla"))
    draft.each_engine(
        groups=layout,
        num_blocks=512,
        host_blocks=4000,
        kv_connector="offloading",
        handshake_timeout_s=draft.rng.choice((0.05, 5.0)),
    )
    draft.config["pull"] = {"enabled": True}


def _levels(draft: Draft) -> None:
    rng = draft.rng
    draft.each_engine(prefill_s_per_token=rng.choice((1e-4, 1e-3)))
    draft.config["policy"] = {
        "service_levels": True,
        "slo_refuse": rng.choice(("off", "wait", "first-token")),
        "slo_ttft_ms_high": 300.0,
        "slo_ttft_ms_normal": rng.choice((800.0, 5000.0)),
    }
    asked = ({}, {}, {"x-slo-ttft-ms": "150"}, {"x-kvatlas-priority": "low"}, {"x-kvatlas-priority": "high"})
    draft.fields = lambda: dict(rng.choice(asked))
    if rng.random() < 0.5:
        draft.config["queue"] = {"saturation_s": rng.choice((0.05, 0.5))}


def _replicas(draft: Draft) -> None:
    draft.routers = draft.rng.choice((2, 2, 3))
    draft.redis = True
    if draft.rng.random() < 0.2:
        draft.each_engine(host_blocks=600)


def _load_only(draft: Draft) -> None:
    """Replicas that share load only; with limits, or engines without events, which have no index anyway."""
    _replicas(draft)
    draft.config["index"] = {"share": "load"}
    if draft.rng.random() < 0.3:
        _tenants(draft)
    elif draft.rng.random() < 0.3:
        _silent(draft)


def _sglang(draft: Draft) -> None:
    rng = draft.rng
    draft.layout = "full"
    draft.each_engine(kind="sglang", groups="full", num_blocks=1024)
    for one in draft.engines:
        del one["hash_algo"]
    if rng.random() < 0.5:
        draft.each_engine(load_port=5600)
    if rng.random() < 0.3:
        draft.each_engine(host_blocks=600)


def _silent(draft: Draft) -> None:
    """Engines without events: all, or the last one."""
    some = draft.engines if draft.rng.random() < 0.5 else draft.engines[-1:]
    for one in some:
        one["publish_events"] = False


def _picker(draft: Draft) -> None:
    draft.gateway = True


def _agents(draft: Draft) -> None:
    draft.apis = ("messages", "messages", "responses", "responses", "chat")


def _order(draft: Draft) -> None:
    """Two engines that schedule by priority, slow enough for prompts to wait, and clients of all classes."""
    rng = draft.rng
    draft.engines = draft.engines[:2]
    draft.token_lengths = (100, 700, 1000)
    draft.each_engine(
        scheduling_policy="priority",
        prefill_s_per_token=rng.choice((3e-4, 1e-3)),
        max_num_seqs=rng.choice((1, 4)),
        num_blocks=8192,
    )
    draft.config["policy"] = {"engine_priority": rng.choice((1.0, 2.0))}
    asked = ({}, {}, {}, {"x-kvatlas-priority": "low"}, {"x-kvatlas-priority": "high"})
    draft.fields = lambda: dict(rng.choice(asked))


def _churn(draft: Draft) -> None:
    """Engines that join during the traffic, and lengths that differ."""
    rng = draft.rng
    if rng.random() < 0.5:
        draft.engines.append(dict(draft.base))
        draft.spare = (len(draft.engines) - 1,)
    if rng.random() < 0.5:
        draft.engines[0]["max_model_len"] = 300
    for one in draft.engines:
        one["prefill_s_per_token"] = rng.choice((1e-6, 1e-5, 1e-4, 1e-3))


def _continuation(draft: Draft) -> None:
    """Long streams, most of them of text that splits characters over tokens, and engines that break them."""
    rng = draft.rng
    draft.each_engine(
        characters="mixed",
        stream_interval=rng.choice((1, 1, 5)),
        decode_s_per_token=rng.choice((1e-2, 4e-2)),
        prefill_s_per_token=rng.choice((1e-5, 1e-3)),
        num_blocks=8192,
    )
    draft.config["proxy"] = {"continue_streams": rng.random() < 0.8}
    draft.apis = ("chat", "chat", "completions", "tokens")
    draft.answer_tokens, draft.stream_share = (120, 300, 300), 0.9
    draft.fault_kinds, draft.fault_counts = BREAKS, (2, 4, 8)
    asked: tuple[dict[str, Any], ...] = (
        {},
        {"ignore_eos": True},
        {"ignore_eos": True},
        {"min_tokens": 100},
        {"stop": ["er", " story", "漢"]},
        {"stop": "🙂 "},
        {"presence_penalty": 0.5},
    )
    draft.body = lambda: dict(rng.choice(asked))
    draft.fields = lambda: {"x-kvatlas-continue": "off"} if rng.random() < 0.1 else {}
    if rng.random() < 0.3:
        draft.config["queue"] = {"saturation_s": 0.5}
        _with_tenants(draft)


KINDS: dict[str, Callable[[Draft], None]] = {
    "plain": _plain,
    "pd": _pd,
    "tenants": _tenants,
    "pull": _pull,
    "levels": _levels,
    "replicas": _replicas,
    "sglang": _sglang,
    "silent": _silent,
    "picker": _picker,
    "agents": _agents,
    "churn": _churn,
    "order": _order,
    "load-only": _load_only,
    "continuation": _continuation,
}


def draw(seed: int, kind: str = "", *, requests: int = 40, faults: bool = True) -> Plan:
    """The plan of a seed; without ``kind``, seeds take turns through all of them."""
    names = list(KINDS)
    kind = kind or names[seed % len(names)]
    draft = Draft(seed, kind, requests=requests, faults=faults)
    KINDS[kind](draft)
    if draft.rng.random() < _PROBED_SHARE:
        draft.config["fleet"] = {"probe": True}
    return draft.plan()
