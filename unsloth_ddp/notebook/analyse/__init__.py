"""Decide where each statement of a notebook runs, and warn about what cannot be decided."""
