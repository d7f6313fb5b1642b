"""Parts of the hybrid block pool; ``publisher.block_pool`` is the public module."""
