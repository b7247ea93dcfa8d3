"""Chat models for agent frameworks whose client is the gateway's."""
