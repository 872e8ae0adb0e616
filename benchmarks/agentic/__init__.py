"""Agents' trajectories, recorded as lengths and replayed through routers: `make bench-agents`."""
