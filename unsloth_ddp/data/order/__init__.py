"""Order rows: packs, batches of a step, and streams."""
