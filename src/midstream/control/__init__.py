"""Makes replicas converge on the desired snapshot: a pure decision, and the loop that carries it out."""
