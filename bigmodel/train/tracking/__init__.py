"""Tracking: a run's configuration, numbers, images and tables, sent to the tools that show them."""

from .aim import AimTracker
from .base import GeneralTracker, on_main_process
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .registry import available_trackers, filter_trackers, register_tracker_class, start_trackers
from .swanlab import SwanLabTracker
from .tensorboard import TensorBoardTracker
from .trackio import TrackioTracker
from .wandb import WandBTracker

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "available_trackers",
    "filter_trackers",
    "on_main_process",
    "register_tracker_class",
    "start_trackers",
]
