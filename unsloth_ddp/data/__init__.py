"""Turn source rows into messages, tokens, packs and batches, before or during training."""
