"""Code that runs inside SGLang's own processes, in SGLang's environment. It imports nothing of midstream."""
