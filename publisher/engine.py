"""A simulated vLLM engine: OpenAI HTTP, ``/metrics`` and real ZMQ KV events, without GPU or model.

It keeps a real block pool (``publisher.block_pool``), schedules like vLLM (``simulator.scheduler``), computes
step durations by a formula, and answers with random words. Its cache reports, in
``usage.prompt_tokens_details.cached_tokens`` and in events, equal those of a real engine with that pool.
Sampling parameters, stop strings and log-probabilities are accepted and have no effect.

This is the public module of the package ``publisher.simulator``. It needs the ``router`` extra (uvicorn,
tokenizers, jinja2, prometheus_client); the rest of ``publisher`` does not.
"""

from __future__ import annotations

from publisher.simulator.api_protocol import ChatRequest
from publisher.simulator.model import EngineModel
from publisher.simulator.request import SimRequest
from publisher.simulator.server import SimulatedEngine, run
from publisher.simulator.settings import (
    DEMO_TOKENIZER_DIR,
    PRESETS,
    EngineSettings,
    model_length,
    resolve_groups,
)
from publisher.simulator.stepper import VirtualEngine

__all__ = [
    "DEMO_TOKENIZER_DIR",
    "PRESETS",
    "ChatRequest",
    "EngineModel",
    "EngineSettings",
    "SimRequest",
    "SimulatedEngine",
    "VirtualEngine",
    "model_length",
    "resolve_groups",
    "run",
]
