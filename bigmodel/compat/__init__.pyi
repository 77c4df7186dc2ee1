from .reporting import report as report
from .stand_in import install as install
from .stand_in import is_installed as is_installed
