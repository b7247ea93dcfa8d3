"""Trinity-RFT on Ray: the same functions, data and YAML on a cluster. Extra `trinity`."""
