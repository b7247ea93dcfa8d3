"""`tuner plan`: seconds of a step, told from measured runs for a file and for hardware to come."""
