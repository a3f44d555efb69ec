"""Define every option of a run once, and read them from the command line and YAML files."""
