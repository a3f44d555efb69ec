"""Estimate memory, steps, time and network load of a run before renting GPUs."""
