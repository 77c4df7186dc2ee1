from .run import run_over_nodes as run_over_nodes
