"""From a request body to the block hashes an engine would compute."""
