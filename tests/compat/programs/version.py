import json
import os
import sys

import accelerate

print(json.dumps(["version", accelerate.__version__]))
print(json.dumps(["arguments", sys.argv[1:]]))
print(json.dumps(["name", __name__]))
print(json.dumps(["workload", [os.environ.get(f"BIGMODEL_{name}") for name in ("BATCH_SIZE", "CONTEXT_LENGTH")]]))
