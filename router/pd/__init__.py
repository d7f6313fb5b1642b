"""Prefill and decode on different engines: the two bodies, what is handed over, and what happens next."""
