"""State: the rank of this process, its process group, and the state of gradient accumulation."""
