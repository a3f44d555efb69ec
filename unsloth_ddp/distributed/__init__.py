"""Start, connect, watch and stop the processes of a run."""
