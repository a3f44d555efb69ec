"""Carry out one run as a whole: its folder, its logs, its table, its outcome."""
