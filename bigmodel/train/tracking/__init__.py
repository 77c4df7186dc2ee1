"""Tracking: a run's configuration, numbers, images and tables, sent to the tools that show them."""

from .base import GeneralTracker, on_main_process
from .comet import CometMLTracker
from .mlflow import MLflowTracker
from .registry import available_trackers, filter_trackers, register_tracker_class, start_trackers
from .tensorboard import TensorBoardTracker
from .trackio import TrackioTracker
from .wandb import WandBTracker

__all__ = [
    "CometMLTracker",
    "GeneralTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "available_trackers",
    "filter_trackers",
    "on_main_process",
    "register_tracker_class",
    "start_trackers",
]
