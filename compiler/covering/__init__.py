"""Which kernels compute the graph: every match of every pattern, the exact cheapest cover, a reason for each loser."""
