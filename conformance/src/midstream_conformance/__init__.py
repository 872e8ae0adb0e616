"""The promised behaviours of an endpoint, row by row, checked from outside over HTTP.

A distribution of its own. Of midstream it imports the client, the reading and encoding of snapshot files, errors and names;
never the server, and never torch.
"""
