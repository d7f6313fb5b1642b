"""Parts of the simulated engine; ``publisher.engine`` is the public module."""
