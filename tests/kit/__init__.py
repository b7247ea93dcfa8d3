"""What tests of several rooms use: models, agents, runs, servers, clocks, forked processes."""
