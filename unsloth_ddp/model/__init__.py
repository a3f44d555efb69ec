"""Load a model, and decide how its attention, output head and activations behave."""
