"""The first import of the process that others are forked from, which has nothing to collect."""

import gc

gc.disable()
gc.set_threshold(20_000, 10, 10)
