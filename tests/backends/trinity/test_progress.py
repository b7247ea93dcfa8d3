"""Reports are read while they are written."""

from tuner.backends.run_directory import RunDirectory
from tuner.backends.trinity.journal import report_file
from tuner.backends.trinity.progress import Progress


def progress_of(folder):
    path = report_file(folder, "trainer")
    path.parent.mkdir()
    made = Progress(RunDirectory(folder), explorer="explorer", trainer="trainer", evaluations=[])
    return made, path


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path):
    progress, path = progress_of(tmp_path)
    path.write_text('{"step": 1, "actor/grad_norm": 1.0}\n{"step": 2, "actor/g')
    assert progress.trained_steps() == [1]
    with path.open("a") as file:
        file.write('rad_norm": 2.0}\n')
    assert progress.trained_steps() == [1, 2]


def test_what_is_added_to_a_step_later_belongs_to_it(tmp_path):
    progress, path = progress_of(tmp_path)
    path.write_text('{"step": 1, "a": 1.0}\n')
    assert progress.reports("trainer") == {1: {"a": 1.0}}
    with path.open("a") as file:
        file.write('{"step": 1, "b": 2.0}\n')
    assert progress.reports("trainer") == {1: {"a": 1.0, "b": 2.0}}


def test_forgotten_steps_do_not_come_back_when_the_report_goes_on(tmp_path):
    progress, path = progress_of(tmp_path)
    path.write_text("".join(f'{{"step": {n}, "a": {n}.0}}\n' for n in (1, 2, 3)))
    assert set(progress.reports("trainer")) == {1, 2, 3}
    progress.forget_after(trained=1, explored=0)
    assert set(progress.reports("trainer")) == {1}
    with path.open("a") as file:
        file.write('{"step": 2, "a": 5.0}\n')
    assert progress.reports("trainer") == {1: {"a": 1.0}, 2: {"a": 5.0}}
