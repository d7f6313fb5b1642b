"""The simulated engine's HTTP server: paths, bodies and errors as vLLM has them."""
