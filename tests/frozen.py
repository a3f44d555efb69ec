"""Do in the fork server of tests.ranks what every rank would do again, and keep it out of their garbage collections.

A collection in a rank visits all objects, and so copies the memory that it shares with the server: half of the time of
a short job. The server imports this module last.
"""

import functools
import gc
from importlib import metadata

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from unsloth_ddp.utils.versions import versions

# Transformers compiles 700 patterns for the first model that it loads: a quarter of a second in every rank.
get_checkpoint_conversion_mapping("llama")
# A run reads the versions of packages several times, for which Python parses their whole descriptions.
metadata.version = functools.cache(metadata.version)
versions()
gc.collect()
gc.freeze()
