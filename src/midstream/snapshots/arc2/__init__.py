"""Incremental snapshots in the ARC2 format: deltas are made from two checkpoints, and applied to one."""
