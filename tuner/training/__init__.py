"""The trainer: batches, log-probs, optimizer."""

from tuner.training.batch import Batch, Row, build_batch
from tuner.training.trainer import PolicyTrainer, ScoredBatch, TrainerSettings

__all__ = ["Batch", "PolicyTrainer", "Row", "ScoredBatch", "TrainerSettings", "build_batch"]
