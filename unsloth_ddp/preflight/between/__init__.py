"""Bring the processes of a job together, compare their nodes, and measure the network."""
