"""The rows, one module per group; importing a module registers its rows."""
