"""Sets of keys are written in several places; each key in them is a setting that there is."""

from fnmatch import fnmatchcase

import pytest

from tuner.config.foreign import FOREIGN
from tuner.config.keys import schema_paths
from tuner.config.schema import TunerSection
from tuner.runs.directory import MAY_CHANGE_HERE
from tuner.trinity.handover import OUR_DEFAULTS
from tuner.trinity.refusals import REFUSALS, USED, WITH_TINKER, WITHOUT_EFFECT
from tuner.trinity.resume import MAY_CHANGE_THERE

OURS = set(schema_paths())
THEIRS = OURS | {row.path for row in FOREIGN}


def unknown(keys, known):
    """Those that are neither settings nor sections; `*` stands for any part of a key."""

    def is_there(key):
        return any(
            fnmatchcase(one, key) or fnmatchcase(key, one) or one.startswith(f"{key}.")
            for one in known
        )

    return [key for key in keys if not is_there(key)]


@pytest.mark.parametrize("names", [USED, WITHOUT_EFFECT], ids=["used", "without effect"])
def test_what_trinity_reads_of_our_section_or_leaves_alone_is_in_it(names):
    assert names <= set(TunerSection.model_fields)
    assert not USED & WITHOUT_EFFECT


def test_what_may_change_while_a_run_goes_on_is_a_setting():
    assert unknown(MAY_CHANGE_HERE, OURS) == []


def test_what_may_change_on_trinity_is_a_setting():
    # The arguments of a workflow are any.
    keys = [key for key in MAY_CHANGE_THERE if ".workflow_args." not in key]
    assert unknown(keys, THEIRS) == []


def test_what_trinity_gets_as_everywhere_has_a_default():
    assert set(OUR_DEFAULTS) <= OURS


def test_what_trinity_is_not_to_get_is_a_setting():
    # vLLM's own arguments are any.
    keys = [row.key for row in (*REFUSALS, *WITH_TINKER) if ".extra_engine_args." not in row.key]
    assert unknown(keys, THEIRS) == []
