"""Keep what the fork server of tests.ranks has imported out of the garbage collections of its ranks.

A collection in a rank visits all objects, and so copies the memory that it shares with the server: half of the time of a
short job. The server imports this module last.
"""

import gc

gc.collect()
gc.freeze()
