"""What-if simulation: a fleet of exact block pools on a virtual clock, behind the production policy code.

``workload`` makes the requests and their times, ``fleet`` simulates one fleet with the ``setup`` of a run,
``study`` runs many and sums up. Nothing waits for real time, and a run depends only on its inputs.
"""
