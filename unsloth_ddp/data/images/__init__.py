"""Read the images of rows, check them, and turn them into what a model takes beside tokens."""
