"""The engine port over an unmodified SGLang server: token ids in and out over HTTP."""
