"""Moving bytes between device blocks and host rows. Needs numpy and, for devices, torch; never vLLM."""
