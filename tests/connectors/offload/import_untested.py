"""``python -m tests.connectors.offload.import_untested MODULE``: import it under an untested vLLM."""

import importlib
import sys

import vllm

vllm.__version__ = "0.99.0"
importlib.import_module(sys.argv[1])
