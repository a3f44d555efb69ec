"""Check one node."""
