"""The names of ``accelerate.tracking``: the trackers."""

from typing import Any

from bigmodel.train.tracking import AimTracker as AimTracker
from bigmodel.train.tracking import ClearMLTracker as ClearMLTracker
from bigmodel.train.tracking import CometMLTracker as CometMLTracker
from bigmodel.train.tracking import DVCLiveTracker as DVCLiveTracker
from bigmodel.train.tracking import GeneralTracker as GeneralTracker
from bigmodel.train.tracking import MLflowTracker as MLflowTracker
from bigmodel.train.tracking import SwanLabTracker as SwanLabTracker
from bigmodel.train.tracking import TensorBoardTracker as TensorBoardTracker
from bigmodel.train.tracking import TrackioTracker as TrackioTracker
from bigmodel.train.tracking import WandBTracker as WandBTracker
from bigmodel.train.tracking import filter_trackers as filter_trackers
from bigmodel.train.tracking import on_main_process as on_main_process
from bigmodel.train.tracking import register_tracker_class as register_tracker_class
from bigmodel.train.tracking.registry import available_trackers
from bigmodel.train.types import LoggerType as LoggerType

LOGGER_TYPE_TO_CLASS: dict[str, Any] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}
"""The built-in trackers by name."""


def get_available_trackers() -> list[LoggerType | str]:
    """Return the trackers whose packages are installed: kinds, and names of those that programs have registered."""
    return [LoggerType(name) if name in LoggerType else name for name in available_trackers()]
