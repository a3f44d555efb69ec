"""Turn the result of a run into the files or the command that another program needs."""
