"""Load a model, and configure its attention, output head and gradient checkpointing."""
