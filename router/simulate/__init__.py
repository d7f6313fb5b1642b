"""What-if runs: a fleet of exact block pools on a virtual clock, behind the policy code that serves.

``workload`` says who asks what and when, ``engine`` and ``timing`` how an engine answers, ``fleet`` places
requests through ``arms``, ``outcome`` sums up. Nothing here waits, and a run depends on its inputs alone.
"""
