"""The pages that a gateway shows to everybody: their paths and files. Pure.

Always holds: what is in PAGES_OPEN says nothing of the server but its version, so it needs no key.
"""

from __future__ import annotations

#: The dashboard's page, its files, and the stream that feeds it, which needs a key.
DASHBOARD = "/dashboard"
DASHBOARD_FILES = (
    "app.js",
    "charts.js",
    "lanes.js",
    "tables.js",
    "trace.js",
    "style.css",
    "uPlot.js",
    "uPlot.css",
    "icon.svg",
)
DASHBOARD_EVENTS = DASHBOARD + "/events"
#: The document of the HTTP API, and the page that shows it. Both are the same on every server of a version.
OPENAPI, DOCS = "/openapi.json", "/docs"
DOCS_FILES = ("docs.js", "docs.css", "swagger-ui-bundle.js", "swagger-ui.css")

PAGES_OPEN = (
    DASHBOARD,
    *(f"{DASHBOARD}/{name}" for name in DASHBOARD_FILES),
    OPENAPI,
    DOCS,
    *(f"{DOCS}/{name}" for name in DOCS_FILES),
)
