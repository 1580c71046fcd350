"""Every kernel of the contract in plain torch: slow and exact; what the fast ones are tested against."""
