"""The Tinker API: /api/v1/* as the `tinker` SDK speaks it, in a process of its own (`front`), and the trainer behind it.

Always holds: nothing here imports torch but the modules of `trainer` that run in the trainer's process.
"""
