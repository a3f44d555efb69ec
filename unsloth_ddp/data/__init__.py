"""Turn source rows into messages, tokens, packs and batches, read beforehand or while training goes on."""
