"""The run configuration: Trinity-RFT's YAML keys, overrides and checks."""
