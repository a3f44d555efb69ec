"""Decide whether rows are packed, and compute attention and convolutions within the rows of a pack."""
