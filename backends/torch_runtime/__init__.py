"""What every backend on torch shares: it walks the execution graph and calls one kernel per operator."""
