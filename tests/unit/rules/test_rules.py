"""Rules: the effect of one update on the center, as in the literature."""

import json
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core import reduction
from sparkdl.core.reduction import AdaptiveSum, Mean, Total, adaptive_sum
from sparkdl.errors import ConfigError, RuleError
from sparkdl.rules import (
    ADAG,
    AEASGD,
    BMUF,
    RULES,
    STUDIED,
    Adasum,
    Average,
    DiLoCo,
    DynSGD,
    FedOpt,
    Merge,
    MergeName,
    Rule,
    Sum,
    apply,
    choose,
)
from sparkdl.rules.outer import SGD, Adam
from sparkdl.rules.settings import from_settings, to_settings

ROUND = Merge(0, 1)
SINGLY = [Average, Sum, ADAG, DynSGD]  # rules that merge updates one by one, without state
numbers = st.floats(-1e3, 1e3, width=32)
deltas = st.lists(numbers, min_size=1, max_size=6).map(lambda v: np.array(v, np.float32))
directions = st.lists(st.integers(-99, 99), min_size=1, max_size=6).map(lambda v: np.array(v, np.float32))
merges = st.builds(Merge, staleness=st.integers(0, 50), workers=st.integers(1, 50), steps=st.integers(1, 50))
groups = (
    st.integers(1, 6)
    .flatmap(lambda size: st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=1, max_size=6))
    .map(lambda rows: [np.array(row, np.float32) for row in rows])
)


def noise(seed, size=5):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def reduced(reduction, vectors, weights=None):
    """Return a reduction's result for vectors with these weights, 1 each by default."""
    for vector, weight in zip(vectors, weights or [1.0] * len(vectors), strict=True):
        reduction.add(vector, weight)
    return reduction.result()


def rounds(rule, center, *rounds_):
    """Return the center after rounds of deltas of equal weight."""
    state = rule.init(center)
    for vectors in rounds_:
        step, state = rule.update(reduced(rule.reduction(), vectors), state, ROUND)
        center = center + step
    return center


# -- one by one -----------------------------------------------------------------------------------


@given(deltas, merges)
def test_average_moves_the_center_by_a_kth_part(delta, merge):
    """Average moves the center by delta / K."""
    step, _ = Average().update(delta, None, merge)

    np.testing.assert_array_max_ulp(step, delta / np.float32(merge.workers), 2)


@given(deltas, merges)
def test_sum_adds_the_delta_whole(delta, merge):
    """Sum moves the center by delta."""
    np.testing.assert_array_equal(Sum().update(delta, None, merge)[0], delta)


@given(deltas, merges)
def test_dynsgd_divides_by_staleness_plus_one(delta, merge):
    """DynSGD moves the center by delta / (staleness + 1)."""
    step, _ = DynSGD().update(delta, None, merge)

    np.testing.assert_array_max_ulp(step, delta / np.float32(merge.staleness + 1), 2)


@given(deltas, merges)
def test_adag_divides_by_the_batches_of_the_window(delta, merge):
    """ADAG moves the center by delta / window."""
    step, _ = ADAG().update(delta, None, merge)

    np.testing.assert_array_max_ulp(step, delta / np.float32(merge.steps), 2)


@given(deltas, st.integers(1, 50))
def test_rules_agree_where_there_is_nothing_to_make_up_for(delta, workers):
    """An update of one batch that is not stale is added whole by DOWNPOUR, ADAG and DynSGD."""
    steps = [rule().update(delta, None, Merge(0, workers, 1))[0] for rule in (Sum, ADAG, DynSGD)]

    np.testing.assert_array_equal([delta] * 3, steps)


@pytest.mark.parametrize("rule", SINGLY)
@given(delta=deltas, merge=merges, at=st.integers(0, 6))
def test_a_rule_works_element_by_element(rule, delta, merge, at):
    """Rules work element by element, so that hogwild can merge stripes."""
    whole = rule().update(delta, None, merge)[0]
    parts = [rule().update(part, None, merge)[0] for part in (delta[:at], delta[at:])]

    np.testing.assert_array_equal(whole, np.concatenate(parts))


# -- in rounds ------------------------------------------------------------------------------------


@given(groups, st.lists(st.floats(0.5, 1e3), min_size=6, max_size=6))
def test_a_mean_is_weighted(vectors, weights):
    """A mean weighs each vector by its weight."""
    weights = weights[: len(vectors)]

    np.testing.assert_allclose(
        reduced(Mean(), vectors, weights), np.average(vectors, axis=0, weights=weights), 1e-4, 1e-2
    )


@given(groups)
def test_a_total_is_the_sum(vectors):
    """A total is the sum, whatever the weights."""
    weights = [1.0 + k for k in range(len(vectors))]

    np.testing.assert_allclose(reduced(Total(), vectors, weights), np.sum(vectors, axis=0), 1e-4, 1e-2)


@pytest.mark.parametrize("length", [1, 6, 7])
@pytest.mark.parametrize("kind", [Mean, Total])
def test_a_vector_of_several_parts_is_added_whole(monkeypatch, kind, length):
    """A vector added in parts has the same bits as one added whole, and the parts are unchanged."""
    vectors = np.random.default_rng(0).normal(size=(4, length)).astype("float32")
    sent, weights = vectors.copy(), [3.0, 3.0, 5.0, 0.5]
    at_once = reduced(kind(), vectors, weights)
    monkeypatch.setattr(reduction, "PART", 3)

    np.testing.assert_array_equal(at_once, reduced(kind(), vectors, weights))
    np.testing.assert_array_equal(sent, vectors)
    with pytest.raises(ValueError, match="shape"):
        reduced(kind(), [np.zeros(7, np.float32), np.zeros(5, np.float32)], weights)


@pytest.mark.parametrize("kind", [Mean, Total])
def test_overflows_of_a_scaled_loss_are_added_in_silence(kind):
    """Infinite gradients of both signs raise no warning: float16 optimizers need them to scale less."""
    huge = np.float32(3e38)
    vectors = [
        np.array([1, 1, huge], np.float32),
        *np.array([[np.inf, 1, huge], [-np.inf, 1, huge]], np.float32),
    ]

    total = reduced(kind(), vectors)

    assert [False, True, False] == np.isfinite(total).tolist()
    assert np.isnan(total[0])


@pytest.mark.parametrize("kind", [Mean, Total, AdaptiveSum])
@given(vectors=groups)
def test_a_reduction_changes_nothing_that_it_is_given(kind, vectors):
    """A reduction does not change its vectors; a single vector is the result bit for bit."""
    kept = [vector.copy() for vector in vectors]
    reduced(kind(), vectors)

    np.testing.assert_array_equal(kept, vectors)
    np.testing.assert_array_equal(vectors[0], reduced(kind(), vectors[:1], [3.0]))
    assert 0 == len(kind().result())


@given(st.permutations(range(4)))
def test_mean_and_sum_do_not_care_who_is_which_worker(order):
    """The order of workers changes mean and sum by rounding only."""
    for kind in (Mean, Total):
        np.testing.assert_allclose(
            reduced(kind(), [noise(k) for k in range(4)]),
            reduced(kind(), [noise(k) for k in order]),
            1e-5,
            1e-6,
        )


@given(directions, st.floats(0.125, 8))
def test_adasum_averages_what_is_parallel(delta, factor):
    """Adasum of two parallel vectors is their mean, whatever their lengths."""
    np.testing.assert_allclose(adaptive_sum(delta, delta), delta, 1e-5)
    longer = delta * np.float32(factor)
    np.testing.assert_allclose(adaptive_sum(delta, longer), (delta + longer) / 2, 1e-3, 1e-3)


@given(directions, directions)
def test_adasum_adds_what_is_orthogonal(first, second):
    """Adasum of two orthogonal vectors is their sum."""
    first, second = np.append(first, 0 * second), np.append(0 * first, second)

    np.testing.assert_array_equal(first + second, adaptive_sum(first, second))


@given(directions, directions)
def test_adasum_of_two_does_not_care_which_is_first(first, second):
    """Adasum of two vectors is symmetric."""
    size = min(len(first), len(second))

    np.testing.assert_array_equal(
        adaptive_sum(first[:size], second[:size]), adaptive_sum(second[:size], first[:size])
    )


def test_adasum_follows_the_paper():
    """Adasum equals (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, computed by hand."""
    a, b = np.array([1, 0], np.float32), np.array([1, 1], np.float32)

    assert [0.5 + 0.75, 0.75] == adaptive_sum(a, b).tolist()


def test_adasum_goes_pair_by_pair_over_a_tree():
    """Adasum combines neighbours first, in worker order; a leftover joins last."""
    a, b, c, d, e, f, g = (noise(k) for k in range(7))
    pairs = [adaptive_sum(a, b), adaptive_sum(c, d), adaptive_sum(e, f)]
    expected = adaptive_sum(adaptive_sum(pairs[0], pairs[1]), adaptive_sum(pairs[2], g))

    np.testing.assert_array_equal(expected, reduced(Adasum().reduction(), [a, b, c, d, e, f, g]))


# -- outer optimizers -----------------------------------------------------------------------------


def test_diloco_follows_nesterov():
    """Two rounds equal v = momentum v + g, c -= rate (g + momentum v) by hand; g is minus the mean delta."""
    actual = rounds(
        DiLoCo(outer_learning_rate=0.5, outer_momentum=0.5),
        np.zeros(1, np.float32),
        [np.array([2], np.float32), np.array([4], np.float32)],
        [np.array([1], np.float32)],
    )
    first = 0.5 * (3 + 0.5 * 3)
    second = 0.5 * (1 + 0.5 * (0.5 * 3 + 1))

    assert [first + second] == actual.tolist()


def test_bmuf_repeats_a_mean_as_often_as_there_are_workers():
    """With K = 4, v = 3/4 v + mean and c += mean + 3/4 v: 1.75 at first, fading to 4 in total."""
    rule, mean = BMUF().bound(4), np.ones(1, np.float32)
    state, steps = rule.init(mean), []
    for delta in [mean, *[0 * mean] * 60]:
        step, state = rule.update(delta, state, ROUND)
        steps.append(float(step[0]))

    assert [1.75, 0.5625, 0.421875] == steps[:3]
    assert 4.0 == pytest.approx(sum(steps), rel=1e-5)


@pytest.mark.parametrize(("power", "momentum"), [(0.0, 0.0), (0.5, 0.75), (1.0, 0.9375)])
def test_bmufs_momentum_depends_on_the_number_of_workers(power, momentum):
    """BMUF's momentum is 1 - K ** -power unless it is given."""
    assert momentum == BMUF(power=power).bound(16).block_momentum
    assert 0.25 == BMUF(0.25, power).bound(16).block_momentum


@given(st.lists(groups.map(lambda vectors: [vector[:1] for vector in vectors]), min_size=1, max_size=4))
def test_bmuf_is_diloco_with_another_rate_and_momentum(rounds_):
    """BMUF and DiLoCo are the same Nesterov update with different rates and momenta."""
    diloco, center = DiLoCo(outer_learning_rate=1.0, outer_momentum=0.5), np.zeros(1, np.float32)

    np.testing.assert_array_equal(rounds(diloco, center, *rounds_), rounds(BMUF(0.5), center, *rounds_))


@given(st.lists(groups.map(lambda vectors: [vector[:1] for vector in vectors]), min_size=1, max_size=4))
def test_diloco_of_rate_one_without_momentum_is_averaging(rounds_):
    """DiLoCo with rate 1 and no momentum equals averaging bit for bit."""
    center = np.ones(1, np.float32)
    plain = DiLoCo(outer_learning_rate=1.0, outer_momentum=0.0)

    np.testing.assert_array_equal(rounds(Average(), center, *rounds_), rounds(plain, center, *rounds_))


def test_heavy_ball_momentum_keeps_what_went_before():
    """Heavy-ball momentum equals v = momentum v + g, c -= rate v."""
    center = rounds(
        FedOpt(SGD(learning_rate=1.0, momentum=0.5)),
        np.zeros(1, np.float32),
        [np.array([2], np.float32)],
        [np.array([4], np.float32)],
    )

    assert [2 + (1 + 4)] == center.tolist()


def test_fedadam_follows_the_paper():
    """FedAdam follows algorithm 2 of Reddi et al.: no bias correction, v starts at tau squared."""
    center = rounds(
        FedOpt(Adam(learning_rate=0.5, beta_1=0.5, beta_2=0.75, tau=1.0)),
        np.zeros(1, np.float32),
        [np.array([2], np.float32)],
        [np.array([4], np.float32)],
    )
    first, second = 0.5 * 2, 0.75 * 1 + 0.25 * 4
    expected = 0.5 * first / (second**0.5 + 1)
    first, second = 0.5 * first + 0.5 * 4, 0.75 * second + 0.25 * 16
    expected += 0.5 * first / (second**0.5 + 1)

    assert expected == pytest.approx(center[0])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SGD, {"learning_rate": 0.0}, "learning_rate should be above 0; got 0.0."),
        (SGD, {"momentum": 1.0}, "momentum should be at least 0 and below 1; got 1.0."),
        (Adam, {"beta_2": -0.1}, "beta_2 should be at least 0 and below 1; got -0.1."),
        (Adam, {"tau": 0}, "tau should be above 0; got 0."),
        (BMUF, {"block_momentum": 1.0}, "block_momentum should be at least 0 and below 1; got 1.0."),
        (BMUF, {"power": 2}, "power should be from 0 to 1; got 2."),
        (DiLoCo, {"outer_learning_rate": -1}, "learning_rate should be above 0; got -1."),
    ],
)
def test_settings_that_mean_nothing_are_refused(kind, settings, message):
    """Invalid settings are refused by name, with the expected values."""
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


# -- springs --------------------------------------------------------------------------------------


@given(directions, st.integers(1, 50))
def test_a_spring_draws_both_its_ends(local, workers):
    """With e = alpha (w - c) the worker continues from w - e and the center takes c + e."""
    rule, center = AEASGD().bound(workers), np.full_like(local, 7)
    elastic = rule.draw(local, center)
    step, _ = rule.update(elastic, None, Merge(3, workers, 2))

    np.testing.assert_allclose(0.9 / workers * (local - center), elastic, 1e-6)
    np.testing.assert_array_equal(elastic, step)


def amplification(rule, workers, shrink, *, in_rounds):
    """Return the factor by which a cycle may lengthen center and workers, whose steps shrink their weights.

    A cycle is linear, so its matrix follows from its effect on unit vectors. The factor is the largest
    absolute eigenvalue.
    """
    center, *local = np.eye(workers + 1, dtype=np.float32)
    total = Total()
    for k in range(workers):
        local[k] = local[k] * np.float32(shrink)
        elastic = rule.draw(local[k], center)
        local[k] = local[k] - elastic
        if in_rounds:
            total.add(elastic, 1.0)
        else:
            center = center + rule.update(elastic, None, Merge(0, workers))[0]
    if in_rounds:
        center = center + rule.update(total.result(), None, ROUND)[0]
    return np.abs(np.linalg.eigvals(np.array([center, *local]))).max()


@given(st.integers(1, 64), st.floats(-0.9, 0.99), st.booleans())
def test_springs_are_stable_with_the_alpha_of_the_paper(workers, shrink, in_rounds):
    """With alpha = 0.9 / K the center comes to rest at the minimum, for any K and in any order."""
    assert amplification(AEASGD().bound(workers), workers, shrink, in_rounds=in_rounds) < 1


def test_springs_of_eight_workers_are_unstable_with_an_alpha_for_one():
    """In rounds with K alpha far above 2 the workers throw the center beyond the minimum."""
    assert amplification(AEASGD(0.9), 8, 0.9, in_rounds=True) > 2


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1])
def test_a_spring_that_draws_nothing_or_too_far_is_refused(alpha):
    """An alpha that moves nothing or too far is refused with the valid range."""
    with pytest.raises(ConfigError, match=f"alpha should be above 0 and below 1; got {alpha}."):
        AEASGD(alpha)


# -- every rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule not in (FedOpt, DiLoCo, BMUF)])
@given(delta=deltas)
def test_one_worker_alone_adds_its_delta_without_a_rounding(rule, delta):
    """A single worker's center is its trained weights, bit for bit."""
    np.testing.assert_array_equal(rule().update(delta, None, ROUND)[0], delta)


@pytest.mark.parametrize("rule", RULES.values())
@given(delta=deltas, merge=merges)
def test_a_rule_changes_none_of_its_arguments(rule, delta, merge):
    """A rule does not change its arguments: a stripe may be merged again, or a state resumed."""
    before, state = delta.copy(), rule().init(delta)
    step, after = rule().update(delta, state, merge)
    again, _ = rule().update(delta, state, merge)

    np.testing.assert_array_equal(before, delta)
    np.testing.assert_array_equal(step, again)
    assert (after is None) == (state is None)


DEFAULTS = [
    ("synchronous", 1, Average, 0.0),
    ("synchronous", 16, BMUF, 0.5),
    ("synchronous", None, BMUF, 0.5),
    ("asynchronous", 1, Sum, 0.0),
    ("asynchronous", 4, DynSGD, 0.5),
    ("hogwild", None, DynSGD, 0.5),
]


@pytest.mark.parametrize(("mode", "window", "kind", "power"), DEFAULTS)
def test_every_mode_has_a_default_rule(mode, window, kind, power):
    """Every mode has the default rule in the table of docs/explanation/modes.md."""
    choice = choose(None, mode=mode, window=window)

    assert isinstance(choice.rule, kind)
    assert 4.0**power == choice.bound(4)[1]


@pytest.mark.parametrize(("mode", "window", "kind", "power"), DEFAULTS)
@given(delta=deltas)
def test_for_one_worker_every_default_is_plain_keras(mode, window, kind, power, delta):
    """With one worker every default rule adds deltas bit for bit, at the unscaled learning rate."""
    rule, scale = choose(None, mode=mode, window=window).bound(1)
    state = rule.init(np.zeros_like(delta))
    for _ in range(2):
        step, state = apply(rule, delta, state, Merge(0, 1))
        np.testing.assert_array_equal(delta, step)

    assert 1.0 == scale


@pytest.mark.parametrize(("mode", "window"), [("synchronous", 16), ("asynchronous", None)])
def test_defaults_go_no_further_than_the_study(mode, window):
    """Defaults for more workers than studied use the largest studied number; named rules do not."""
    choice = choose(None, mode=mode, window=window)

    assert choice.bound(STUDIED) == choice.bound(10 * STUDIED)
    assert 0.9875 == choose("bmuf", mode="synchronous", window=16).bound(80)[0].block_momentum


def test_a_rule_that_is_named_is_taken_at_the_rate_as_it_is():
    """A named rule uses the unscaled learning rate, as in the literature."""
    assert (BMUF(), 0.0) == choose("bmuf", mode="synchronous", window=None)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_chosen_by_its_name(name):
    """Users choose a rule by its name."""
    mode = "asynchronous" if RULES[name].rounds else "synchronous"

    assert isinstance(choose(name, mode=mode, window=4).rule, RULES[name])


def test_editors_complete_the_names_of_all_rules():
    """The type of SparkModel's ``merge`` lists the name of every rule."""
    assert tuple(RULES) == typing.get_args(MergeName)


def test_a_rule_may_be_given():
    """A rule may be given as an object, with custom settings or as a custom class."""
    rule = DiLoCo(outer_learning_rate=0.3)

    assert rule is choose(rule, mode="synchronous", window=None).rule


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("dynsgd", "synchronous", "in rounds: it divides an update by its staleness"),
        ("adag", "synchronous", "in rounds: it normalizes updates that are merged one by one"),
        ("adasum", "asynchronous", "one by one: it combines the updates of a round"),
        ("diloco", "hogwild", "one by one: its optimizer steps once per round"),
    ],
)
def test_a_rule_that_means_nothing_in_a_mode_is_refused(name, mode, message):
    """A rule that does not suit a mode is refused with the reason and an alternative."""
    with pytest.raises(
        ConfigError, match=f'merge="{name}" cannot be used in a mode that merges updates {message}'
    ):
        choose(name, mode=mode, window=None)


class Keeping(Rule):
    """A custom rule with a state."""

    name = "keeping"

    def init(self, center):
        return 0

    def update(self, delta, state, merge):
        return delta * np.float64(0.5), state + 1


def test_a_rule_that_keeps_a_state_is_not_for_hogwild():
    """A rule with a state is refused in hogwild, which merges parts of an update separately."""
    with pytest.raises(
        ConfigError, match='merge="keeping" keeps a state between updates, but mode="hogwild"'
    ):
        choose(Keeping(), mode="hogwild", window=1)


def test_a_step_is_float32_whatever_a_rule_makes():
    """A step is float32 whatever dtype the rule returns, as messages require."""
    step, after = apply(Keeping(), np.ones(3, np.float32), 4, Merge(0, 1))

    assert ([0.5] * 3, np.float32, 5) == (step.tolist(), step.dtype, after)


@pytest.mark.parametrize("update", [lambda *_: 1 / 0, lambda delta, *_: (delta[1:], None), lambda *_: None])
def test_a_rule_that_fails_is_named(update):
    """A run whose rule fails, in whatever way, ends with an error that names the rule."""
    rule = type("Odd", (Rule,), {"name": "odd", "update": lambda self, *arguments: update(*arguments)})()
    with pytest.raises(RuleError, match="The rule 'odd' failed on an update"):
        apply(rule, np.ones(3, np.float32), None, Merge(0, 1))


def test_an_unknown_rule_is_refused_by_name():
    """The error for an unknown rule lists the known ones."""
    with pytest.raises(ConfigError, match="one of 'average', 'sum', .*, or a Rule; got 'vote'."):
        choose("vote", mode="asynchronous", window=None)


def test_a_rule_without_an_update_is_not_one():
    """A rule without an update method cannot be instantiated."""
    with pytest.raises(NotImplementedError):
        Rule().update(np.ones(1, np.float32), None, ROUND)


@pytest.mark.parametrize(
    "merge",
    [
        None,
        "sum",
        DiLoCo(0.3, 0.5),
        AEASGD(0.2),
        BMUF(power=0.5),
        Adasum(),
        FedOpt(SGD(0.5, 0.9, nesterov=True)),
        FedOpt(),
    ],
    ids=lambda merge: getattr(merge, "name", str(merge)),
)
def test_a_rule_can_be_written_as_json(merge):
    """A rule's settings are saved as JSON and make the same rule again."""
    written = json.dumps(to_settings(merge))
    again = from_settings(json.loads(written))

    assert type(again) is type(merge)
    assert repr(merge) == repr(again) or isinstance(merge, Adasum)


def test_a_rule_of_ones_own_cannot():
    """A custom rule is refused before anything is written."""

    class Own(Rule):
        name = "own"

    for rule in (Own(), FedOpt(optimizer=object())):
        with pytest.raises(ConfigError, match="a rule of sparkdl.rules if the settings are saved; got "):
            to_settings(rule)
