import json
import sys

import accelerate

print(json.dumps(["version", accelerate.__version__]))
print(json.dumps(["arguments", sys.argv[1:]]))
print(json.dumps(["name", __name__]))
