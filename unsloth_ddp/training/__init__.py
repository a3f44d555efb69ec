"""Take training steps: the trainer, its loss, its memory, its metrics."""
