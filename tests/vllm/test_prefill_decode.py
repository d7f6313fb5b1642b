"""The whole router before two real vLLM engines that exchange KV by NIXL over TCP.

Prompts begin with a prefix that the prefill engine was made to hold, so that the pair is the cheaper choice.
"""

from __future__ import annotations

import json
import queue
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import openai
import pytest
import zmq

from tests.support.paths import ROOT
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE_MAX, WAIT_S, wait_until
from tests.vllm.observed_fleet import BLOCK_TOKENS, EventTap, Fleet, running
from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import VllmEngine
from tests.vllm.watched_way import Way

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

NUM_GPU_BLOCKS = 400
PREFIX_TOKENS = 16 * BLOCK_TOKENS
LEASE_S = 20
"""Of all prefill engines here: as short as loaded machines allow, since tests wait until it is over. Prompts
are computed, and engines that never met know each other, in two thirds of it; the rest is margin."""
SPLITS_TRIED = 8
LONG_TOKENS = 40
REPEATED = ("pd_handoffs_redirected", "pd_handoffs_lost", "pd_answers_late", "proxy_requests_moved")
"""Metrics of a request whose decode engine fails; one of them counts it."""
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 3}
FREE_CHOICE = (
    "--set",
    f"pd.lease_s={LEASE_S}",
    "--set",
    "pd.min_remote_tokens=64",
    "--set",
    "pd.leg_overhead_s=0",
    "--set",
    "pd.transfer_s_per_token=0",
    "--set",
    "policy.spread=0",  # which engine answers does not depend on the tests before
    "--set",
    "proxy.connect_timeout_s=20",
    # Engines that share two cores are slow to answer polls; one that is killed refuses connections.
    "--set",
    "fleet.poll_timeout_s=60",
    # This shows what each failure costs without a wait for a sign of life.
    "--set",
    "proxy.suspect_s=0",
)


T = TypeVar("T")


class Apart(NamedTuple):
    fleet: Fleet
    prefill: VllmEngine
    decode: VllmEngine

    def client(self, base_url: str | None = None) -> openai.OpenAI:
        """Of the router, or of an engine."""
        url = base_url or self.fleet.router.base_url
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def all_up(self) -> None:
        """Whom another test has ended is back: as another one, with another name at the side channel."""
        for engine in (self.prefill, self.decode):
            if not engine.started:
                engine.start()
                engine.wait_until_healthy()
                self.fleet.taps[engine.base_url].connect()
                self.fleet.router.wait_until_up(engine.base_url)

    def settle(self) -> None:
        for engine in (self.prefill, self.decode):
            self.fleet.settle(engine.base_url)

    def warmed(self, number: int, tail: int) -> list[int]:
        """A prompt whose beginning the prefill engine holds; no engine holds the rest."""
        rng = random.Random(number)
        prefix = [rng.randrange(10, 1000) for _ in range(PREFIX_TOKENS)]
        with self.client(self.prefill.base_url) as client:
            client.completions.create(model="tiny", prompt=[*prefix, 5], max_tokens=1)
        self.settle()
        return prefix + [rng.randrange(10, 1000) for _ in range(tail)]

    def legs(self) -> list[dict[str, Any]]:
        """The last two receipts."""
        return self.fleet.router.receipts()[-2:]

    def split(self, ask: Callable[[int], T]) -> T:
        """Result of ``ask`` for a number, once its request went to both engines. Whether it does is the
        router's choice, by costs and times that a busy machine changes: then another number is tried."""
        for number in range(0, 1000 * SPLITS_TRIED, 1000):
            made = ask(number)
            self.settle()
            if [one["leg"] for one in self.legs()] == ["prefill", "decode"]:
                return made
        raise AssertionError(f"never split: {self.legs()}\n{self.fleet.router.log_tail()}")

    def split_prompt(self, number: int, tail: int, **asked: Any) -> tuple[list[int], Any]:
        """Such a prompt, of those that ``warmed`` makes, and the client's raw answer."""

        def ask(again: int) -> tuple[list[int], Any]:
            prompt = self.warmed(number + again, tail)
            with self.client() as client:
                make = client.completions.with_raw_response.create
                return prompt, make(model="tiny", prompt=prompt, **asked)

        return self.split(ask)


def _engine(python: str, model: Path, log: Path, role: str) -> VllmEngine:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    return VllmEngine(
        python,
        model,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        log=log,
        extra_args=(
            "--block-size",
            str(BLOCK_TOKENS),
            "--max-model-len",
            "2048",
            "--max-num-batched-tokens",
            "512",
            "--kv-transfer-config",
            json.dumps(transfer),
            "--logits-processors",
            "tests.vllm.held_steps:HeldSteps",
        ),
        environment={
            "PYTHONPATH": str(ROOT),
            "UCX_TLS": "tcp,self,sysv,posix,cma",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
        },
    )


@pytest.fixture(scope="module")
def apart(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    logs = tmp_path_factory.mktemp("logs")
    engines = [
        _engine(vllm_python, tiny_model, logs / f"{role}.log", role) for role in ("producer", "consumer")
    ]
    roles = ("prefill", "decode")
    with running(engines, tiny_model, log=logs / "router.log", roles=roles, options=FREE_CHOICE) as fleet:
        yield Apart(fleet, *engines)


@pytest.fixture(autouse=True)
def everybody_up(apart: Apart) -> None:
    apart.all_up()


@pytest.fixture(autouse=True)
def router_logs(apart: Apart, request: pytest.FixtureRequest) -> Iterator[None]:
    """pytest shows what a fixture prints where the test has failed."""
    yield
    routers = [apart.fleet.router]
    if "watched" in request.fixturenames:
        routers.append(request.getfixturevalue("watched").router)
    for router in routers:
        print(router.log_tail())


def _alone(apart: Apart, prompt: list[int]) -> Any:
    """Answer of an engine that computes everything: another salt, so nothing is cached."""
    with apart.client(apart.prefill.base_url) as client:
        salted = {"cache_salt": "alone"}
        return client.completions.create(model="tiny", prompt=prompt, extra_body=salted, **ASKED)


def _same(answer: Any, alone: Any) -> None:
    assert answer.choices[0].text == alone.choices[0].text
    assert answer.choices[0].logprobs == alone.choices[0].logprobs


@pytest.mark.parametrize(("number", "tail"), [(1, 1), (2, 70), (3, 300)])
def test_the_answer_is_bit_for_bit_that_of_one_engine_and_both_receipts_are_right(
    apart: Apart, number: int, tail: int
) -> None:
    prompt, raw = apart.split_prompt(number, tail, **ASKED)
    answer = raw.parse()
    assert raw.headers["x-kvatlas-engine"] == apart.decode.base_url
    assert raw.headers["x-kvatlas-prefill-engine"] == apart.prefill.base_url
    first, second = apart.legs()
    assert (first["leg"], first["outcome"]) == ("prefill", "exact"), first
    assert first["actual_tokens"] == PREFIX_TOKENS
    assert (second["leg"], second["outcome"]) == ("decode", "unpredicted")
    assert second["actual_tokens"] == PREFIX_TOKENS, "vLLM tells the prefill engine's hit"
    assert second["gap_s"] < 20
    _same(answer, _alone(apart, prompt))


def test_a_streamed_chat(apart: Apart) -> None:
    def ask(number: int) -> list[Any]:
        words = f"{number} gado lime tovu " + "gado lime tovu " * 100
        messages: Any = [{"role": "user", "content": words}]
        with apart.client(apart.prefill.base_url) as client:
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        apart.settle()
        messages[0]["content"] += "and then " * 20
        with apart.client() as client:
            return list(
                client.chat.completions.create(
                    model="tiny",
                    messages=messages,
                    max_tokens=8,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
            )

    parts = apart.split(ask)
    assert parts[-1].usage.completion_tokens == 8


@pytest.mark.parametrize(("tail", "hit"), [(300, 800), (287, 0)])
def test_blocks_left_by_a_transfer_are_predicted_exactly(apart: Apart, tail: int, hit: int) -> None:
    """The same prompt again, at the decode engine alone. Of a window (two blocks long) what the token after
    the prompt looks at is transferred, in whole blocks: enough to go on from the last block's end where that
    is 12 tokens before the prompt's, and too little where it is 31 before."""
    prompt, _ = apart.split_prompt(tail, tail, max_tokens=1)
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    (told,) = apart.fleet.router.explain(body)["engines"]
    assert (told["engine"], told["hit_tokens"]["GPU"]) == (apart.decode.base_url, hit)
    with apart.client(apart.decode.base_url) as client:
        usage = client.completions.create(**body).usage
    assert usage.prompt_tokens_details.cached_tokens == hit


def _figure(base_url: str, name: str) -> float:
    """A metric's sum over its labels; 0 before its first event."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _introduce(apart: Apart, decode: VllmEngine) -> None:
    """It has fetched from the prefill engine: the first time takes so long on a busy machine that vLLM may
    give it up, and a router has the prompt computed again."""
    body: dict[str, Any] = {"model": "tiny", "prompt": [random.randrange(10, 1000) for _ in range(40)]}
    for _ in range(SPLITS_TRIED):
        with apart.client(apart.prefill.base_url) as client:
            asked = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
            held = client.completions.create(**body, max_tokens=1, extra_body=asked).to_dict()
        with apart.client(decode.base_url) as client, suppress(openai.InternalServerError):
            given = {"kv_transfer_params": held["kv_transfer_params"]}
            client.completions.create(**body, max_tokens=1, extra_body=given)
            return
    raise AssertionError(f"{decode.base_url} never fetched")


def _counts(router: RouterProcess, names: tuple[str, ...]) -> dict[str, float]:
    return {name: router.metric(f"kvatlas_pd_{name}_total") for name in names}


def _split_next(apart: Apart, number: int, tail: int) -> tuple[list[int], Any]:
    """A prompt as ``Apart.warmed``, that the router would split; and what one engine says to it."""
    told: dict[str, Any] = {}
    for again in range(0, 1000 * SPLITS_TRIED, 1000):
        prompt = apart.warmed(number + again, tail)
        alone = _alone(apart, prompt)
        apart.settle()
        told = apart.fleet.router.explain({"model": "tiny", "prompt": prompt, **ASKED})
        if told["split"]["prefill"]:
            return prompt, alone
    raise AssertionError(f"never split: {told}")


def _reuse(apart: Apart, rng: random.Random) -> None:
    """Give free blocks of the prefill engine to another prompt."""
    with apart.client(apart.prefill.base_url) as client:
        others = [rng.randrange(10, 1000) for _ in range(2000)]
        client.completions.create(model="tiny", prompt=others, max_tokens=1)


def test_an_answer_of_a_decode_engine_that_stood_still_past_the_lease_is_made_again(apart: Apart) -> None:
    """It was asked in time, and fetches what other prompts have left there; and stores that under this
    prompt's hashes, so that it is asked again with a salt."""
    expired, late = (
        f"vllm:nixl_num_{name}_total" for name in ("kv_expired_reqs", "notifications_after_expiry")
    )
    source, rng, router = apart.prefill.base_url, random.Random(15), apart.fleet.router
    _introduce(apart, apart.decode)
    prompt, alone = _split_next(apart, 14, 300)
    read_late = _figure(source, late)
    names = ("split", "handoffs", "handoffs_lost", "leases_late", "answers_late")
    counts = partial(_counts, router, names)
    asked_before = counts()
    with apart.client() as client, ThreadPoolExecutor(1) as pool:
        make = partial(client.completions.create, model="tiny", prompt=prompt, **ASKED)
        before = _figure(source, expired)
        with apart.decode.standing_still():
            asked = pool.submit(make)
            wait_until(lambda: counts()["handoffs"] > asked_before["handoffs"], "the decode engine is asked")
            over_s = time.monotonic() + LEASE_S + 1
            while time.monotonic() < over_s or _figure(source, expired) == before:
                _reuse(apart, rng)
            for _ in range(3):
                _reuse(apart, rng)
        _same(asked.result(), alone)
        added = {name: count - asked_before[name] for name, count in counts().items()}
        # UCX looks after its connections every 20 s, too: it may have given this one up meanwhile. Then
        # nothing is read late, and the engine answers 500.
        read = added.pop("answers_late")
        assert read in {0, 1}
        assert added == {"split": 1, "handoffs": 1, "handoffs_lost": 1, "leases_late": 0}
    _reuse(apart, rng)  # the engine counts while it works
    if read:
        wait_until(lambda: _figure(source, late) == read_late + 1, "the engine counts the late reading")


def test_parameters_that_would_end_the_decode_engine_reach_no_engine(apart: Apart) -> None:
    with apart.client() as client:
        body = {"kv_transfer_params": {"do_remote_prefill": True}}
        client.completions.create(model="tiny", prompt=[5] * 40, max_tokens=1, extra_body=body)
        client.completions.create(model="tiny", prompt=[6] * 40, max_tokens=1)


def test_a_prefill_engine_that_dies_costs_no_answer(apart: Apart) -> None:
    """And when it is back, it is asked again."""
    prompt = apart.warmed(9, 100)
    alone = _alone(apart, prompt)
    apart.prefill.kill()
    with apart.client() as client:
        answer = client.completions.create(model="tiny", prompt=prompt, **ASKED)
    _same(answer, alone)
    apart.all_up()
    apart.split_prompt(10, 100, **ASKED)


@contextmanager
def _held(folder: Path) -> Iterator[dict[str, Any]]:
    """Fields of a streamed answer that is not over before the block is: its engine stands still meanwhile."""
    file = folder / "held"
    file.touch()
    try:
        yield {
            "max_tokens": LONG_TOKENS,
            "extra_body": {"ignore_eos": True, "vllm_xargs": {"hold_while": str(file)}},
        }
    finally:
        file.unlink()


class Watched(NamedTuple):
    """The same prefill engine before two decode engines, each by a way that the test watches."""

    apart: Apart
    router: RouterProcess
    prefill: Way
    decode: dict[str, tuple[VllmEngine, EventTap, Way]]
    """By the address that the router knows."""

    def all_up(self) -> None:
        """Those that a test has ended are back."""
        for engine, tap, way in self.decode.values():
            engine.start()
            engine.wait_until_healthy()
            tap.connect()  # by an ordinary prompt, without which some machines' decode engines crash
            way.open()
            self.router.wait_until_up(way.url)
            _introduce(self.apart, engine)
        self.router.wait_until_up(self.prefill.url)

    def kill(self, url: str) -> None:
        """``kill -9`` of one decode engine."""
        engine, _, way = self.decode[url]
        engine.kill()
        way.close()

    def warmed(self, number: int, tail: int) -> tuple[list[int], Any]:
        """A prompt as ``Apart.warmed``, that this router would split; and what one engine says to it."""
        tap = self.apart.fleet.taps[self.apart.prefill.base_url]
        told: dict[str, Any] = {}
        for again in range(0, 1000 * SPLITS_TRIED, 1000):
            prompt = self.apart.warmed(number + again, tail)
            alone = _alone(self.apart, prompt)
            self.router.wait_until_seen(self.prefill.url, tap.barrier())
            told = self.router.explain({"model": "tiny", "prompt": prompt, **ASKED})
            if told["split"]["prefill"]:
                return prompt, alone
        raise AssertionError(f"never split: {told}")

    def ask(self, prompt: list[int]) -> tuple[str, Any]:
        """The decode engine that answered, and its answer."""
        with self.apart.client(self.router.base_url) as client:
            raw = client.completions.with_raw_response.create(model="tiny", prompt=prompt, **ASKED)
        return raw.headers["x-kvatlas-engine"], raw.parse()

    def counts(self) -> dict[str, float]:
        """The router's counters of splits, and of what is done again."""
        names = ("pd_split", "proxy_streams_broken", *REPEATED)
        return {name: self.router.metric(f"kvatlas_{name}_total") for name in names}

    def transfers(self, name: str) -> float:
        """One of the prefill engine's counters; 0 before its first event."""
        return _figure(self.apart.prefill.base_url, f"vllm:nixl_num_{name}_total")

    def wait_until_free(self) -> None:
        """Block until the prefill engine keeps no blocks for anybody; it counts while it works only."""
        with self.apart.client(self.apart.prefill.base_url) as client:

            def free() -> bool:
                client.completions.create(model="tiny", prompt=[5] * 40, max_tokens=1)
                return not _figure(self.apart.prefill.base_url, "vllm:kv_cache_usage_perc")

            wait_until(free, "the prefill engine keeps no blocks", wait_s=WAIT_S + LEASE_S)


@pytest.fixture(scope="module")
def watched(apart: Apart, vllm_python: str, tiny_model: Path, tmp_path_factory: Any) -> Iterator[Watched]:
    logs = tmp_path_factory.mktemp("watched")
    third = _engine(vllm_python, tiny_model, logs / "consumer.log", "consumer")
    with ExitStack() as stack:
        stack.callback(third.stop)
        third.start()
        third.wait_until_healthy()
        prefill = Way(apart.prefill.base_url, b'"do_remote_decode":true')
        told = {}
        context = stack.enter_context(zmq.Context())
        for engine in (apart.decode, third):
            tap = EventTap(context, engine, "GPU")
            stack.callback(tap.close)
            way = Way(engine.base_url, b'"do_remote_prefill":true')
            told[way.url] = engine, tap, way
        for way in (prefill, *(way for _, _, way in told.values())):
            stack.callback(way.close)
            way.open()
        words = [f"{prefill.url},role=prefill", *(f"{url},role=decode" for url in told)]
        made = RouterProcess(words, tiny_model, log=logs / "router.log", options=FREE_CHOICE)
        yield Watched(apart, stack.enter_context(made), prefill, told)


def test_blocks_whose_lease_is_over_are_never_fetched(watched: Watched) -> None:
    """The router stands still from the prefill engine's answer until that engine has freed the blocks and
    given each of them to other prompts: a request that fetches them now answers 200 with something else."""
    watched.all_up()
    prompt, alone = watched.warmed(20, 300)

    def given_up() -> float:
        """Handoffs that were late, and requests taken from an engine that the router, after standing still,
        took for silent."""
        metric = watched.router.metric
        return metric("kvatlas_pd_leases_late_total") + metric("kvatlas_proxy_requests_moved_total")

    too_late = given_up()
    expired, late = watched.transfers("kv_expired_reqs"), watched.transfers("notifications_after_expiry")

    def stand_still() -> None:
        rng, over_s = random.Random(21), time.monotonic() + LEASE_S + 1
        with watched.router.standing_still():
            # Those of the tests before may be counted meanwhile, as the engine counts while it works only.
            while time.monotonic() < over_s or watched.transfers("kv_expired_reqs") == expired:
                _reuse(watched.apart, rng)
            for _ in range(3):
                _reuse(watched.apart, rng)

    watched.prefill.answered = stand_still
    _, answer = watched.ask(prompt)
    _same(answer, alone)
    assert watched.prefill.answered is None, "never split"
    assert given_up() > too_late
    assert watched.transfers("notifications_after_expiry") == late


def test_a_decode_engine_that_dies_before_its_request_costs_no_prefill(watched: Watched) -> None:
    """Another one gets the same blocks."""
    for number in range(30, 30 + 1000 * SPLITS_TRIED, 1000):
        watched.all_up()
        prompt, alone = watched.warmed(number, 100)
        # Which one the request's is, is known once it is asked: this is tried until it was the one killed.
        doomed = watched.router.explain({"model": "tiny", "prompt": prompt, **ASKED})["choice"]["engine"]
        before = watched.counts()
        watched.prefill.answered = partial(watched.kill, doomed)
        engine, answer = watched.ask(prompt)
        watched.prefill.answered = None
        _same(answer, alone)
        assert engine != doomed
        added = {name: count - before[name] for name, count in watched.counts().items()}
        if not any(added[name] for name in REPEATED):
            continue
        if added["pd_answers_late"] or added["proxy_requests_moved"]:
            # On a slow machine the second answer came after its lease, too, and was made again; or the router
            # saw the engine's end before it asked it, or was refused.
            return
        # A kept connection may have broken while the request went out: then the blocks are not used twice.
        assert (added["pd_handoffs_redirected"], added["pd_handoffs_lost"]) in {(1, 0), (0, 1)}
        assert added["pd_split"] == 1 + added["pd_handoffs_lost"]
        return
    raise AssertionError("the engine that was killed was never the request's")


def test_a_decode_engine_that_dies_with_its_request_costs_no_answer(watched: Watched) -> None:
    """Whether the blocks were fetched is unknown, so that they are computed again."""
    watched.all_up()
    prompt, alone = watched.warmed(31, 100)
    before = watched.counts()
    killed: list[str] = []

    def kill(url: str) -> None:
        for _, _, way in watched.decode.values():
            way.asked = None
        killed.append(url)
        watched.kill(url)

    for url, (_, _, way) in watched.decode.items():
        way.asked = partial(kill, url)
    engine, answer = watched.ask(prompt)
    assert killed, "never split"
    _same(answer, alone)
    assert [engine] != killed
    added = {name: count - before[name] for name, count in watched.counts().items()}
    if added["pd_answers_late"] or added["proxy_requests_moved"]:
        return  # as above
    assert (added["pd_handoffs_redirected"], added["pd_handoffs_lost"], added["pd_split"]) == (0, 1, 2)


def test_a_decode_engine_that_dies_within_an_answer_ends_that_one_alone(
    watched: Watched, tmp_path: Path
) -> None:
    """The client has had a part of it, so no other engine can answer: it gets an error. Nothing stays held,
    and the next request goes to the other decode engine."""
    watched.all_up()
    later, alone = watched.warmed(41, 100)
    for number in range(40, 40 + 1000 * SPLITS_TRIED, 1000):
        prompt, _ = watched.warmed(number, 100)
        before = watched.counts()
        with _held(tmp_path) as long, watched.apart.client(watched.router.base_url) as client:
            stream = client.completions.create(model="tiny", prompt=prompt, stream=True, **long)
            next(stream)
            if "x-kvatlas-prefill-engine" not in stream.response.headers:
                continue
            doomed = stream.response.headers["x-kvatlas-engine"]
            watched.kill(doomed)
            with pytest.raises(openai.APIError, match="before its answer was complete"):
                for _ in stream:
                    pass
        break
    else:
        raise AssertionError("never split")
    added = {name: count - before[name] for name, count in watched.counts().items()}
    assert added["proxy_streams_broken"] == 1
    assert added["pd_split"] == 1 or any(added[name] for name in REPEATED), "a slow machine's was made again"
    watched.wait_until_free()
    engine, answer = watched.ask(later)
    _same(answer, alone)
    assert engine != doomed


def test_an_engine_that_is_terminated_under_load_aborts_no_clients_request(
    watched: Watched, tmp_path: Path
) -> None:
    """vLLM ends what it has with 200 and ``abort``, or is gone before it does: whole answers come from
    another engine, streams that had text end with an error."""
    watched.all_up()
    answering: queue.Queue[str] = queue.Queue()

    def whole(number: int, _held: dict[str, Any]) -> list[str]:
        more: dict[str, Any] = {"max_tokens": LONG_TOKENS, "extra_body": {"ignore_eos": True}}
        with watched.apart.client(watched.router.base_url) as client:
            answer = client.completions.create(model="tiny", prompt=[number + 10] * 40, **more)
        return [answer.choices[0].finish_reason]

    def stream(number: int, asked: dict[str, Any]) -> list[str]:
        messages: Any = [{"role": "user", "content": f"{number} gado lime tovu"}]
        reasons: list[str] = []
        with watched.apart.client(watched.router.base_url) as client:
            pieces = client.chat.completions.create(model="tiny", messages=messages, stream=True, **asked)
            with suppress(openai.APIError):
                for piece in pieces:
                    answering.put(pieces.response.headers["x-kvatlas-engine"])
                    reasons.append(piece.choices[0].finish_reason or "")
        return reasons

    failures = partial(_figure, watched.router.ops_url, "kvatlas_proxy_engine_failures_total")
    before = failures()

    with ThreadPoolExecutor(8) as pool:
        with _held(tmp_path) as long:
            asked = [pool.submit(ask, number, long) for number in range(4) for ask in (whole, stream)]
            url = answering.get(timeout=WAIT_S * PATIENCE_MAX)
            engine, _, way = watched.decode[url]
            engine.stop()
            way.close()
        reasons = {reason for one in asked for reason in one.result()}
    assert reasons <= {"length", ""}, reasons
    assert failures() > before, f"{url} had nothing to end"
