"""Code that runs inside vLLM's own worker processes, in vLLM's environment. It imports nothing of midstream."""
