"""Prefill and decode on different engines: both request bodies, the handoff, and the request's states."""
