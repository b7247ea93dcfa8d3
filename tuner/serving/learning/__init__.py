"""Learning while serving: what it takes, how it trains, what is proven, and which weights serve."""
