"""List the runs of a folder, compare two of them, and write the report of one."""
