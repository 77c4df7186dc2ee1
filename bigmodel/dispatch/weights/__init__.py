"""What a streamed or mapped block is: its weights, their layout in memory, their quantised form."""
