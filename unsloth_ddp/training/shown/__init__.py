"""Measure a run while it trains, and show it."""
