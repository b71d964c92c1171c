"""The drop-in torch module and the operators registered with torch.library."""
