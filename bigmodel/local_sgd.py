"""The names of ``accelerate.local_sgd``: averaging parameters now and then."""

from bigmodel.train import LocalSGD as LocalSGD
