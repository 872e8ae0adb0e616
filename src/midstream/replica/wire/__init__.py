"""The inference APIs that a replica answers: each reads requests and tells responses in its own JSON. Pure."""
