"""Configure, read and merge adapters."""
