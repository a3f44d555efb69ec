"""Define what is trained: the units of a task, the loss of a micro-batch, and what the loss is divided by."""
