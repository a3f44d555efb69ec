"""Find, check, identify and write the files of a model."""
