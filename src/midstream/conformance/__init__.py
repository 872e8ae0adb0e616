"""The promised behaviours of an endpoint, row by row, checked from outside over HTTP. Never imports torch or the server."""
