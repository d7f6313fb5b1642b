"""The simulated engine's parts; ``publisher.engine`` is the face the rest of the project uses."""
