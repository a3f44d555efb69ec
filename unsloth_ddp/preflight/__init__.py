"""Check every node and the whole job before training, and print one table of verdicts with remedies."""
