"""The trainer: one process that holds the models being trained.

`types`, `errors`, `protocol` and `process` are for those who use it and import no torch. The other modules run in its process.
"""
