"""What scripts import from `accelerate.utils`, under the same names: `from bigmodel.utils import set_seed`.

Every public name of `bigmodel` is here, too. Names are listed in `__init__.pyi` and imported when they are first used.

Not here, because there is nothing they could mean: Megatron-LM, TPU (XLA), SageMaker, MS-AMP and TransformerEngine; the
folder of `.dat` files for offloaded weights (a checkpoint is used where it lies); bitsandbytes' own loader
(transformers' `BitsAndBytesConfig` does that); and helpers by which accelerate's own command line starts processes.
"""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
