"""Code that runs inside vLLM's own processes, in vLLM's environment. It imports nothing of midstream, and loads one of its files
(claims.py) by the path."""
