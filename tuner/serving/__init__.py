"""A long-lived gateway for agents that run elsewhere; rewards come later, weights with proof."""
