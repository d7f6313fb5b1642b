"""Load of one engine: our requests, other clients' requests, its memory pages, and its speed."""
