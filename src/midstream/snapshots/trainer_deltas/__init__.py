"""Incremental snapshots as trainers write them for their own engines: the disk deltas of Miles and of SkyRL. Read only."""
