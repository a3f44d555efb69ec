"""Compute an optimizer step: losses, micro-batches, and the exchange of gradients."""
