"""Compiled code of the tests is kept, also where the environment says otherwise: each process would compile it anew."""

import os
import sys

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of processes that tests start
