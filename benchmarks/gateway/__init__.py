"""make bench-gateway: midstream's gateway and other routers on the same mock replicas under the same load."""
