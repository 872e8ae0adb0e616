"""Exact sessions: the turns of each session as token ids, and prompts that continue them."""
