"""Adapters between trainers and a server, one module per trainer. midstream installs none of these trainers.

Always holds: rollouts ask for the run's own snapshots, so no run samples what an earlier one left.
"""
