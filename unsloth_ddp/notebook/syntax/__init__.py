"""Read Python and IPython syntax: names, calls, lines and what calls do."""
