"""Text and token ids: the tokenizer, chat templates, tool calls in text, and what an answer must match. Imports no torch."""
