"""Replicas of Ray Serve as an engine of the server."""
