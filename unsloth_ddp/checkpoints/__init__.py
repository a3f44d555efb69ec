"""Write checkpoints that are whole or absent, and choose the one that a run resumes from."""
