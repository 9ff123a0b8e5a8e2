"""What every side shares: the contract (numpy only), the mathematics (torch) and the edges to other systems."""
