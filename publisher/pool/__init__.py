"""Parts of the hybrid block pool; ``kvatlas.publisher.block_pool`` is the public module."""
