"""A process that is a Ray cluster of two machines of one processor each; Ray knows no difference to real ones.

Prints the cluster's address, and ends it when its standard input closes.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
