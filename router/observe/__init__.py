"""Metrics and receipts."""
