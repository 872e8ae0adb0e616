"""Snapshots as files: names, fetching, layout, verification, local cache. No engine, no torch, no HTTP."""
