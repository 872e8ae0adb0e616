"""Adapters between trainers and a server, one module per trainer. Each imports its trainer, which midstream does not install.

Always holds: an adapter publishes the run's own weights before the first rollout, and asks for at least them.
"""
