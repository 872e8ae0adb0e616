"""What a request may ask: its body, the rules between its fields, and what it needs of the engine. Pure."""
