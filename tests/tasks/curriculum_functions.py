"""Functions that give tasks weights, right ones and wrong ones; named in settings."""

import numpy as np


def unseen_first(results):
    """What no step took yet, and nothing else while there is some."""
    return (results.visits == 0).astype(float)


def only_hard(results):
    return [float(task["hard"]) for task in results.tasks]


def nothing(results):
    return np.zeros(len(results.tasks))


def too_few(results):
    return [1.0]


def negative(results):
    return np.full(len(results.tasks), -1.0)


def unknown(results):
    return np.full(len(results.tasks), np.nan)


def broken(results):
    raise LookupError("no such table")
