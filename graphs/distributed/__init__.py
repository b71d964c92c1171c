"""One process a GPU: symmetric memory, rank agreement, and the torch.distributed fallback."""
