"""What an admitted request gets: the records of each choice, as a stream or as one response."""
