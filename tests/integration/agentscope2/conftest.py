"""These tests need AgentScope 2.x, in an environment of its own: `make test-agentscope2`."""

from tuner.rollouts.agentscope1 import agentscope_version

if not (agentscope_version() or "").startswith("2."):
    collect_ignore_glob = ["test_*.py"]
