"""Keep what the fork server of tests.ranks has imported out of the garbage collections of its ranks.

A collection in a rank visits all objects, and so copies the memory that it shares with the server: half of the time of a
short job. The server imports this module last.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# Transformers compiles 700 patterns for the first model that it loads: a quarter of a second in every rank.
get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
