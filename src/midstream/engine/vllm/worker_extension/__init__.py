"""Code that runs inside vLLM's own processes, in vLLM's environment. It imports nothing of midstream, and loads one file of it
by its path (claims.py)."""
