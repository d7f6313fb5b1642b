"""Stores that several engines share: one Protocol, checksummed values, deadlines on every call."""
