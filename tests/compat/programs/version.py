import json
import os
import sys

import accelerate

print(json.dumps([f"version {os.environ.get('RANK', '')}".strip(), accelerate.__version__]))
print(json.dumps(["arguments", sys.argv[1:]]))
print(json.dumps(["name", __name__]))
