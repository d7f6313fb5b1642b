"""Predicted times to first token before two real vLLM engines whose steps last a known time.

    KVATLAS_VLLM_PYTHON=... python -m benchmarks.known_steps_engines      (make test-seconds)

``tests/vllm/known_steps.py`` makes the steps last; a client takes the time. A busy machine adds to every
step: the exact shares are those of virtual time (``benchmarks/known_steps.py``); these show what is left of
them with real engines and the router's own path.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import openai

from tests.support.paths import ROOT
from tests.vllm.router_process import RouterProcess
from tests.vllm.tiny_model import write_tiny_model
from tests.vllm.vllm_engine import VllmEngine, side_by_side

STEP_S, TOKEN_S = 0.08, 0.002
ENGINE_ARGS = (
    "--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "1024",
    "--worker-extension-cls", "tests.vllm.known_steps.KnownSteps",
)  # fmt: skip
CHATS = (100, 480)
"""Tokens of a chat's prompt."""


class Answer(NamedTuple):
    engine_id: str
    predicted_s: float
    measured_s: float


class Rig(NamedTuple):
    router: RouterProcess
    factors: dict[str, Path]
    """By engine: the file with the factor of its steps' times."""

    def drive(
        self, state: str, *, clients: int, each: int, tokens: tuple[int, int], pause_s: float
    ) -> list[Answer]:
        """Clients that each send ``each`` prompts, one after the other; the answers in order."""
        found: list[Answer] = []

        def one(seed: int) -> None:
            rng = random.Random(f"{state} {seed}")
            with openai.OpenAI(
                base_url=f"{self.router.base_url}/v1", api_key="none", max_retries=0
            ) as client:
                for _ in range(each):
                    time.sleep(rng.uniform(0, 2 * pause_s))
                    prompt = [rng.randrange(10, 1000) for _ in range(rng.randint(*tokens))]
                    found.append(_ask(client, prompt, rng.randint(2, 8)))

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def _ask(client: openai.OpenAI, prompt: list[int], answer: int) -> Answer:
    began_s = time.monotonic()
    raw = client.completions.with_raw_response.create(
        model="tiny",
        prompt=prompt,
        max_tokens=answer,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    parts = iter(raw.parse())
    next(parts)
    measured_s = time.monotonic() - began_s
    list(parts)
    predicted_s = int(raw.headers["x-kvatlas-predicted-ttft-ms"]) / 1000
    return Answer(raw.headers["x-kvatlas-engine"], predicted_s, measured_s)


@contextmanager
def engines_of_known_steps(python: str, model: Path, logs: Path) -> Iterator[Rig]:
    """Two engines of vLLM's interpreter, and a router that probes them; logs of all in ``logs``."""
    factors = [logs / f"factor{index}" for index in range(2)]
    engines = []
    for index, factor in enumerate(factors):
        factor.write_text("1")
        environment = {
            "PYTHONPATH": str(ROOT),
            "KVATLAS_STEP_S": str(STEP_S),
            "KVATLAS_TOKEN_S": str(TOKEN_S),
            "KVATLAS_STEP_FACTOR": str(factor),
        }
        engines.append(
            VllmEngine(
                python,
                model,
                num_gpu_blocks=2000,
                log=logs / f"engine{index}.log",
                extra_args=ENGINE_ARGS,
                environment=environment,
            )
        )
    urls = [engine.base_url for engine in engines]
    probing = ("--set", "fleet.probe=true")
    with (
        side_by_side(engines),
        RouterProcess(urls, model, log=logs / "router.log", options=probing) as router,
    ):
        yield Rig(router, dict(zip(urls, factors, strict=True)))


def shares(answers: list[Answer]) -> str:
    off = [abs(one.predicted_s - one.measured_s) / one.measured_s for one in answers]
    cells = (100 * sum(value <= share for value in off) / len(off) for share in (0.1, 0.25))
    return "".join(f"{cell:8.0f} %" for cell in cells) + f"{len(off):10}"


def measured(rig: Rig) -> Iterator[tuple[str, list[Answer]]]:
    """From the guess by the probe on, of chats alone, which taught nothing before, up to saturation; then
    after a change of speed."""
    while not all(engine["probe"] for engine in rig.router.engines()):
        time.sleep(0.2)
    yield "first", rig.drive("first", clients=2, each=10, tokens=CHATS, pause_s=0.3)
    yield "chats", rig.drive("chats", clients=2, each=16, tokens=CHATS, pause_s=0.5)
    yield "light", rig.drive("light", clients=2, each=12, tokens=(20, 1500), pause_s=1.0)
    yield "saturated", rig.drive("saturated", clients=8, each=5, tokens=CHATS, pause_s=0.0)
    for factor in rig.factors.values():
        factor.write_text("2")
    rig.drive("change", clients=3, each=18, tokens=CHATS, pause_s=0.4)
    yield "slower", rig.drive("slower", clients=2, each=10, tokens=CHATS, pause_s=0.6)


def main() -> None:
    python = os.environ.get("KVATLAS_VLLM_PYTHON")
    if not python:
        raise SystemExit("KVATLAS_VLLM_PYTHON must be vLLM's interpreter: make test-seconds sets it")
    with TemporaryDirectory() as folder:
        logs = Path(folder)
        with engines_of_known_steps(python, write_tiny_model(logs / "model"), logs) as rig:
            print(f"{'state':10}{'in 10 %':>10}{'in 25 %':>10}{'answers':>10}")
            for state, answers in measured(rig):
                print(f"{state:10}{shares(answers)}", flush=True)


if __name__ == "__main__":
    main()
