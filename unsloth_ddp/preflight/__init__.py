"""Checks before a run: each node alone, then all together; one table of verdicts with what to do."""
