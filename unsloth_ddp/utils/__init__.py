"""Provide errors, redaction, durable writes, units and versions to every other package."""
