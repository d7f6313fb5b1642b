"""Where the bytes of a block lie in device memory."""
