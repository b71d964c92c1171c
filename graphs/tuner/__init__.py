"""Times kernels alone and inside the captured step, and writes the tables that plans are priced by."""
