"""The names of ``accelerate.utils.random``: seeds."""

from bigmodel.train import set_seed as set_seed
from bigmodel.train import synchronize_rng_state as synchronize_rng_state
from bigmodel.train import synchronize_rng_states as synchronize_rng_states
