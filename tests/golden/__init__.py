"""What a redesign must not change: what requests mean, and what small runs compute."""
