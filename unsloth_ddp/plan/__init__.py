"""Estimate memory, steps and time of a run before renting GPUs."""
