"""The engine's hit rules over blocks held outside the GPU."""
