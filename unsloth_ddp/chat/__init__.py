"""Talk to the result of a run in the terminal."""
