"""Fixtures around a real vLLM. All tests here carry the ``vllm`` marker and skip where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment that has vLLM."""
    python = os.environ.get("KVATLAS_VLLM_PYTHON")
    if not python:
        pytest.skip("KVATLAS_VLLM_PYTHON names no interpreter with vLLM; make test-vllm sets it")
    return python


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory for the engine (``--model``) and the router (``--tokenizer``)."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for the id of the core whose steps are slow (``held_steps:SlowEngine``)."""
    return tmp_path_factory.mktemp("slow") / "core"
