"""Write files that are complete or unchanged, and check files."""
