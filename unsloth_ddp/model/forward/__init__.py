"""Configure how a model computes: compilation, output head, precision and gradient checkpointing."""
