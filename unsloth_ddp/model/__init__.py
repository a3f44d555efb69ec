"""Load a model, decide whether its rows are packed, and configure how it computes."""
