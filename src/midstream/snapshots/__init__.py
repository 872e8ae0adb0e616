"""Snapshots as files. `store` gets them out of buckets, `arc2` makes and applies deltas. No engine, no torch, no HTTP."""
