"""The trainer: one process that holds the models being trained. `messages` and `process` are the front's side and import no
torch; the other modules run in the trainer's process."""
