"""The names of ``accelerate.utils.tqdm``: progress bars of the main process."""

from bigmodel.train import tqdm as tqdm
