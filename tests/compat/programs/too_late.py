import json
import sys
from types import ModuleType

import bigmodel.compat
from bigmodel.errors import CompatError

for name in ("peft", "transformers"):
    sys.modules[name] = ModuleType(name)
    try:
        bigmodel.compat.install()
    except CompatError as error:
        print(json.dumps([name, str(error)]))
    del sys.modules[name]
print(json.dumps(["installed", bigmodel.compat.is_installed()]))
