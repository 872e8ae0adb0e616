"""How a replica changes what it serves: two tables, the driver that does their I/O, and what a switch changes for requests."""
