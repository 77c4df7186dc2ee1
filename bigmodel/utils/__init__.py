"""The names of `accelerate.utils` that scripts import, as in `from bigmodel.utils import set_seed`.

Every public name of `bigmodel` is here, too. Names are listed in `__init__.pyi` and imported on first use.

The modules of `accelerate.utils` (`modeling`, `offload`, `operations`, ...) are here under their names.

Not included: Megatron-LM, TPU (XLA), SageMaker, MS-AMP and TransformerEngine, which are not supported; the bitsandbytes
loader, which is replaced by `BitsAndBytesConfig` of transformers; and helpers by which accelerate's command line starts
processes.
"""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
