"""The parts of the hybrid block pool; ``publisher.block_pool`` is its face."""
