"""Graph to graph: sharding and algebra. Each pass returns a new graph and a log of what it did and why."""
