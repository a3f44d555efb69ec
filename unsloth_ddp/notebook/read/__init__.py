"""Read a notebook and turn it into plain Python: magics, hosts, displayed values."""
