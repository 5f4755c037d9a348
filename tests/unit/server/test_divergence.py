"""Tests of divergence detection: conditions that end a run, and conditions that do not."""

from math import inf, nan

import numpy as np
import pytest

from sparkdl.errors import DivergedError
from sparkdl.server.divergence import DivergenceDetector
from sparkdl.transport.messages import Kind, Update


def center(value):
    return np.array([value], np.float32)


def update(worker, epoch=0, sequence=0):
    return Update(kind=Kind.DELTA, worker=worker, epoch=epoch, sequence=sequence)


def has_diverged(*epochs, start=1.0, merged=True):
    """Return True if a run with these epochs diverges.

    An epoch is its losses, the center at its end, and optionally the losses of the windows' first batches.
    """
    watch = DivergenceDetector(center(start), merged=merged)
    for number, (losses, reached, *first) in enumerate(epochs):
        try:
            watch.end_epoch(number, center(reached), losses, *first)
        except DivergedError:
            return watch.useless
    return watch.useless


FIRST = [1.0, 1.0], 1.0


@pytest.mark.parametrize(
    ("losses", "reached"),
    [([30.0], 2.0), ([12.0], 6.0), ([60.0, nan], 2.0), ([1e30], 1e30), ([2e3], 1.6)],
    ids=str,
)
def test_loss_and_center_that_grow_together_end_a_run(losses, reached):
    """A loss and a center that grow together end a run, despite NaN losses and squares beyond float32."""
    assert has_diverged(FIRST, (losses, reached))


@pytest.mark.parametrize(
    ("losses", "reached"),
    [([0.5], 1e6), ([9.0], 1e6), ([1e6], 1.4), ([12.0], 3.0), ([nan], 1e6), ([], 1e6)],
    ids=str,
)
def test_growth_of_one_of_them_does_not(losses, reached):
    """Growth of the center alone or of the loss alone does not end a run."""
    assert not has_diverged(FIRST, (losses, reached))


def test_a_loss_below_zero_may_rise_too():
    """A negative loss that rises far ends a run; one that falls further does not."""
    first = [-2.0, -2.0], 1.0

    assert has_diverged(first, ([60.0], 3.0))
    assert not has_diverged(first, ([-600.0], 30.0))


def test_a_first_epoch_without_a_finite_loss_says_nothing():
    """An epoch without a finite loss is skipped, and the next one becomes the reference."""
    assert not has_diverged(([inf], 1.0), FIRST)
    assert has_diverged(([inf], 1.0), FIRST, ([60.0], 2.0))


def test_losses_whose_mean_would_be_infinite_are_taken_for_infinite_ones():
    """Losses whose mean would overflow are skipped like infinite ones, and the detector does not fail."""
    assert not has_diverged(([1.7e308, 1.7e308], 1.0), FIRST)
    assert has_diverged(FIRST, ([60.0, 1.7e308, 1.7e308], 2.0, [1.7e308, 1.7e308]))


def test_a_center_that_begins_with_zeros_is_compared_with_that_of_the_first_epoch():
    """A center of zeros, as in a linear model, is compared with the center of the first epoch."""
    assert not has_diverged(([1.0, 60.0], 5.0), start=0.0)
    assert has_diverged(([1.0], 5.0), ([60.0], 10.0), start=0.0)


def test_what_plain_keras_does_is_not_judged():
    """Losses of one worker, or of workers that make each update together, do not end a run."""
    assert not has_diverged(FIRST, ([1e9], 1e9), merged=False)


def test_the_first_losses_are_what_a_run_is_compared_with():
    """The initial loss is the mean of the first 32 batches, not of the whole first epoch."""
    assert has_diverged(([1.0] * 32 + [500.0] * 32, 2.0))


def swinging(start, *firsts, loss=0.5):
    """Return epochs with this loss and these losses of first batches, after which the center's norm is 2."""
    return [([loss], 2.0, [first]) for first in (start, *firsts)]


@pytest.mark.parametrize(
    "epochs",
    [
        swinging(1.0, 9.0, 2.1, 2.1),
        swinging(1.0, 9.0, 0.9, 3.0, 3.0, 3.0),
        swinging(-2.0, 3.0, 3.0, 3.0, loss=-3.0),
    ],
    ids=str,
)
def test_a_center_that_workers_have_to_mend_again_and_again_ends_a_run(epochs):
    """A center that windows have to repair in three consecutive epochs ends a run."""
    assert has_diverged(*epochs)
    assert not has_diverged(*epochs[:-1])
    assert not has_diverged(*epochs, merged=False)


@pytest.mark.parametrize(
    "epochs",
    [
        swinging(1.0, 9.0, 9.0, 0.4, 9.0, 9.0, 0.4),
        swinging(1.0, 1.9, 1.9, 1.9, 1.9),
        swinging(1.0, 9.0, 9.0, 9.0, loss=8.5),
        swinging(1.0, nan, nan, nan),
        swinging(nan, nan, nan, 9.0, 9.0, 9.0, 9.0),
        swinging(0.0, 1.0, 1.0, 1.0, loss=-2.0),
    ],
    ids=str,
)
def test_one_that_is_worse_for_a_while_or_that_they_do_not_mend_does_not(epochs):
    """A center that is worse for a short time, or that windows do not repair, does not end a run."""
    assert not has_diverged(*epochs)


def test_one_that_is_worse_than_a_well_trained_one_does_not():
    """A center that is worse than a well-trained one does not end a run while its norm hardly grows."""
    assert not has_diverged(*((losses, 1.2, first) for losses, _, first in swinging(1e-3, *[0.1] * 9)))


@pytest.mark.parametrize("thrown", [([2.1], 2.0), ([0.8], 2.0, [2.1])], ids=str)
@pytest.mark.parametrize("later", [[1.1] * 3, [1.9, 0.9, 1.5, 1.1]], ids=str)
def test_a_loss_that_rose_far_and_does_not_come_back_ends_a_run(thrown, later):
    """A loss that rose far once and stays above the initial one ends a run."""
    epochs = [FIRST, thrown, *(([loss], 2.0) for loss in [0.9, 0.9, 0.9, *later])]

    assert has_diverged(*epochs)
    assert not has_diverged(*epochs[:-1])
    assert not has_diverged(*epochs[:-1], ([0.9], 2.0))
    assert not has_diverged(FIRST, ([1.9], 2.0), *epochs[2:])
    assert not has_diverged(*((losses, 1.4, *first) for losses, _, *first in epochs))


def test_one_wild_epoch_is_forgiven():
    """A single epoch with a huge loss does not end a run, because most of the last epochs count."""
    assert not has_diverged(FIRST, ([500.0], 1.4), *[([0.9], 2.0)] * 4, ([500.0], 1.4), *[([0.9], 2.0)] * 4)


def test_an_epoch_of_nothing_sound_ends_a_run():
    """An epoch without a sound update ends a run, even if workers are in two epochs at once."""
    watch = DivergenceDetector(center(1.0), merged=True)
    watch.take(update(0, epoch=0), sound=True)
    watch.take(update(0, epoch=1, sequence=1), sound=True)
    watch.take(update(1, epoch=0), sound=False)
    watch.end_epoch(0, center(1.0), [1.0])
    watch.take(update(1, epoch=1, sequence=1), sound=False)
    watch.end_epoch(1, center(1.0), [1.0])
    watch.take(update(0, epoch=2, sequence=2), sound=False)
    with pytest.raises(DivergedError, match="every update of epoch 3 contained NaN, Inf or values"):
        watch.end_epoch(2, center(1.0), [1.0])


@pytest.mark.parametrize("rolled_back", [True, False])
def test_a_restart_forgets_what_comes_again(rolled_back):
    """A restart forgets the counts of updates that are sent again: in rounds those of the epochs, too."""
    watch = DivergenceDetector(center(1.0), merged=True)
    for sequence in range(9):
        watch.take(update(0, sequence=sequence), sound=False)
    watch.restart(rolled_back=rolled_back)

    assert 1 == watch.take(update(0, sequence=0, epoch=1), sound=False)
    if rolled_back:
        watch.end_epoch(0, center(1.0), [])
    else:
        with pytest.raises(DivergedError):
            watch.end_epoch(0, center(1.0), [])


@pytest.mark.parametrize("rolled_back", [True, False])
def test_a_restart_keeps_the_record_of_complete_epochs(rolled_back):
    """A restart does not hide that the loss rose far before it and has not come back."""
    watch = DivergenceDetector(center(1.0), merged=True)
    epochs = [FIRST, ([2.1], 2.0), *(([loss], 2.0) for loss in [0.9, 0.9, 1.1])]
    for epoch, (losses, wider) in enumerate(epochs):
        watch.end_epoch(epoch, center(wider), losses)
        watch.restart(rolled_back=rolled_back)

    with pytest.raises(DivergedError):
        watch.end_epoch(len(epochs), center(2.0), [1.1])
