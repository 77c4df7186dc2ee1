"""State: which process this is, how it trains, and where its training loop stands."""
