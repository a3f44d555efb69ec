"""Convert Unsloth notebooks to scripts that train under DDP."""
