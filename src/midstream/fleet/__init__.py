"""The replicas of a deployment: what is known of them, which one a request goes to, and making them converge on the desired
snapshot.
"""
