"""The trainer: batches, log-probs, optimizer."""

from tuner.training.batch import Batch, Row, build_batch
from tuner.training.recorded import RecordedBatch, recorded_update
from tuner.training.selection import Overlong, Selection
from tuner.training.settings import TrainerSettings
from tuner.training.trainer import PolicyTrainer, ScoredBatch

__all__ = [
    "Batch",
    "Overlong",
    "PolicyTrainer",
    "RecordedBatch",
    "Row",
    "ScoredBatch",
    "Selection",
    "TrainerSettings",
    "build_batch",
    "recorded_update",
]
