"""What runs inside vLLM's own worker processes, in vLLM's environment: no import of midstream, no dependency."""
