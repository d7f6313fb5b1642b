"""Requests that wait for an engine with room: who is next, who has to go, and how long it takes."""
