"""Edit the statements and write the script."""
