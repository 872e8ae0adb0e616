"""The files of the dashboard (api/dashboard.py): a page, its script and style, and uPlot, which draws the charts."""
