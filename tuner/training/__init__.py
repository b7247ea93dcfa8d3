"""The trainer: batches, log-probs, optimizer."""

from tuner.training.batch import Batch, Row, build_batch
from tuner.training.optimizer import MasterAdamW, make_optimizer
from tuner.training.selection import Overlong, Selection
from tuner.training.settings import CriticSettings, TrainerSettings
from tuner.training.trainer import PolicyTrainer, ScoredBatch

__all__ = [
    "Batch",
    "CriticSettings",
    "MasterAdamW",
    "Overlong",
    "PolicyTrainer",
    "Row",
    "ScoredBatch",
    "Selection",
    "TrainerSettings",
    "build_batch",
    "make_optimizer",
]
