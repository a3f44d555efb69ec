"""Watch the ranks of a run, and name one that is lost."""
