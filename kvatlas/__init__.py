"""Routes LLM requests to the vLLM engine that has to compute the least, by what its KV cache really holds.

``router``, ``publisher`` and ``connectors`` are links to the folders of the repository: installed, everything
of kvatlas has this one top-level name.
"""

__version__ = "0.1.0"
