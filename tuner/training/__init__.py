"""The trainer: batches, log-probs, optimizer."""

from tuner.training.batch import Batch, Row, TeacherPrompt, build_batch
from tuner.training.effective import Effective, effective_samples
from tuner.training.history_update import OffPolicyBatch, TooFewEffective, off_policy_update
from tuner.training.likelihood import RecordedBatch, recorded_update
from tuner.training.optimizer import MasterAdamW, make_optimizer
from tuner.training.scoring import ScoredBatch
from tuner.training.selection import Overlong, Selection
from tuner.training.trainer import PolicyTrainer
from tuner.training.trainer_settings import CriticSettings, TrainerSettings

__all__ = [
    "Batch",
    "CriticSettings",
    "Effective",
    "MasterAdamW",
    "OffPolicyBatch",
    "Overlong",
    "PolicyTrainer",
    "RecordedBatch",
    "Row",
    "ScoredBatch",
    "Selection",
    "TeacherPrompt",
    "TooFewEffective",
    "TrainerSettings",
    "build_batch",
    "effective_samples",
    "make_optimizer",
    "off_policy_update",
    "recorded_update",
]
