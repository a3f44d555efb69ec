"""Load a model, whole or in shards, in the class that its config.json names."""
