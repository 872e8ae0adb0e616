"""Weights that a trainer sends: the process that receives them for one replica, and where they lie in the file."""
