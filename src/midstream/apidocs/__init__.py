"""The files of the page that shows the HTTP API (api/reference.py): its own, and Swagger UI, which draws it."""
