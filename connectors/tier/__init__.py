"""What is held outside the GPU, and what gives way."""
