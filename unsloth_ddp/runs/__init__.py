"""List the runs of a folder, and write the report of one."""
