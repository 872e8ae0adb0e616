"""Recomputes what records say, from the snapshots in a bucket: a library, and the logic of `midstream verify`."""
