"""Workloads: requests, their content and their times."""
