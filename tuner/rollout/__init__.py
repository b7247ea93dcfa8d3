"""Running workflows and judges: groups, limits, retries, outcomes."""
