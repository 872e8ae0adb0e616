"""The HTTP rollout API around one engine. See replica.py for the whole, app.py for the server."""
