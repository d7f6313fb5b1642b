"""A simulated vLLM engine: OpenAI HTTP, ``/metrics`` and real ZMQ KV events, without GPU or model.

It keeps a real block pool (``kvatlas.publisher.block_pool``), schedules like vLLM (``scheduler``), computes
step durations by a formula, and answers with random words. Its cache reports, in
``usage.prompt_tokens_details.cached_tokens`` and in events, equal those of a real engine with that pool.
Sampling parameters, stop strings and log-probabilities are accepted and have no effect.

``server.SimulatedEngine`` is an engine in real time, ``stepper.VirtualEngine`` one in virtual time; both take
``settings.EngineSettings``. It needs the ``router`` extra (uvicorn, tokenizers, jinja2, prometheus_client);
the rest of ``publisher`` does not.
"""
