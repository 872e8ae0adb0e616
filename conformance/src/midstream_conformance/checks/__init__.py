"""The rows, one module per group; importing a module registers its rows. `asking` has none: what several groups ask alike."""
