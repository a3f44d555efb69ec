"""Configure how a model computes: attention, output head, precision and gradient checkpointing."""
