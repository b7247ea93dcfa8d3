"""Trinity-RFT on Ray: the same functions, dataset and YAML on a cluster.

Needs the extra `trinity`.
"""
