"""The engine port over an unmodified vLLM server: token ids in and out over HTTP."""
