"""Snapshots in buckets and in the local cache: listed, uploaded, fetched, rebuilt, verified."""
