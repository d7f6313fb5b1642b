"""One simulated fleet on a virtual clock."""
