"""What-if simulation: a fleet of exact block pools on a virtual clock, behind the production policy code.

``workload`` defines the requests and their times, ``run`` simulates one fleet, ``study`` runs many and sums
up. Nothing waits for real time, and a run depends only on its inputs.
"""
