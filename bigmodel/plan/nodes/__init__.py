"""Plans over several nodes: one stage of consecutive layers for each, with a plan of its own."""
