from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from loopformers import ConfigError, DataError
from loopformers.errors import ExitWarning
from loopformers.evaluation.exit import calibrate, measure_exit
from loopformers.generation import ArgmaxExit, KLExit, StateChangeExit, exit_logits, parse_exit_rule
from loopformers.generation.reference import exit_reference
from loopformers.testing import tiny_model


def windows(count=13, length=11, seed=3):
    return [
        {"input_ids": ids} for ids in torch.randint(61, (count, length), generator=torch.Generator().manual_seed(seed))
    ]


def stacked(rows):
    return torch.stack([row["input_ids"] for row in rows])


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_measurement_is_the_loss_and_the_loops_of_the_reference(batch_size):
    model, rows, rule = tiny_model("lt-input", num_loops=5).double(), windows(), KLExit(0.3)
    logits, loops = exit_reference(model, stacked(rows), rule)
    assert len(loops.unique()) > 2
    measured = measure_exit(model, rule, rows, batch_size=batch_size)
    targets = stacked(rows)[:, 1:].flatten()
    assert measured.loss == pytest.approx(F.cross_entropy(logits[:, :-1].flatten(0, 1), targets).item(), abs=1e-9)
    assert measured.average_loops == pytest.approx(loops.double().mean().item())
    with torch.no_grad():
        full = model(stacked(rows)).logits
    assert measured.full_loss == pytest.approx(F.cross_entropy(full[:, :-1].flatten(0, 1), targets).item(), abs=1e-9)
    assert (measured.num_loops, measured.num_targets, measured.rule) == (5, 13 * 10, "kl:0.3")


def test_a_measurement_leaves_the_model_in_its_mode_and_does_not_warn():
    model = tiny_model("flt").train()
    measure_exit(model, ArgmaxExit(1), windows(2), num_loops=2)
    assert model.training


@pytest.mark.parametrize("rule", ["kl", "entropy", "state"])
@pytest.mark.parametrize("average_loops", [2, 3.3, 6])
def test_a_calibrated_rule_meets_its_average(rule, average_loops):
    model, rows = tiny_model("lt-input", num_loops=6), windows(40)
    found = calibrate(model, rule, rows, average_loops=average_loops, batch_size=7)
    assert found.name == rule
    _, loops = exit_reference(model, stacked(rows), found)
    assert loops.float().mean().item() == pytest.approx(average_loops, rel=0.05)
    again = parse_exit_rule(str(found))  # what is printed is what was found, to six digits
    _, again_loops = exit_logits_quietly(model, stacked(rows), again)
    assert again_loops.float().mean().item() == pytest.approx(average_loops, rel=0.05)


def exit_logits_quietly(model, ids, rule):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        return exit_logits(model, ids, rule)


def test_what_cannot_be_calibrated_or_measured_is_refused():
    model = tiny_model("flt", num_loops=4)
    with pytest.raises(ConfigError, match="rule to calibrate='argmax' is not known"):
        calibrate(model, "argmax", windows(), average_loops=3)
    for average in (1, 5, float("nan")):
        with pytest.raises(ConfigError, match=r"must lie between 2.* and the 4 that a token may get"):
            calibrate(model, "kl", windows(), average_loops=average)
    with pytest.raises(DataError, match="no windows"):
        calibrate(model, "kl", [], average_loops=3)
    with pytest.raises(DataError, match="no target"):
        measure_exit(model, KLExit(0.1), [])
    with pytest.raises(ConfigError, match="batch_size=0"):
        measure_exit(model, KLExit(0.1), windows(), batch_size=0)


# -- the warning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "fields", "reason"),
    [
        ("flt", {}, "objective='last_loop' decodes the last loop alone"),
        ("flt", {"objective": "last_third"}, "the last third of the loops alone"),
        ("loopformer", {}, "short runs in training end at time 1"),
        ("elastic-flt", {}, "short runs in training end at time 1"),
    ],
)
def test_a_model_that_was_not_trained_for_it_warns_and_quotes_what_was_measured(preset, fields, reason):
    model, rule = tiny_model(preset, **fields), StateChangeExit(0.3)
    with pytest.warns(ExitWarning, match=rf"exit rule state:0\.3 .*{reason}.*has not been measured: .*measure_exit"):
        model.generate(stacked(windows(2)), max_new_tokens=2, exit_rule=rule)
    measured = measure_exit(model, rule, windows())
    with pytest.warns(ExitWarning, match=rf"loss {measured.loss:.4f} at {measured.average_loops:.2f} loops on average"):
        exit_logits(model, stacked(windows(2)), rule)
    with pytest.warns(ExitWarning, match=r"exit rule kl:1 .*has not been measured"):
        exit_logits(model, stacked(windows(2)), KLExit(1))


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("base-loop-exit", {}),
        ("tmlt-exit", {}),
        ("flt", {"objective": "every_loop"}),
        ("loopformer", {"objective": "every_loop"}),
    ],
)
def test_a_model_that_was_trained_for_it_does_not_warn(preset, fields):
    model = tiny_model(preset, **fields)
    model.generate(stacked(windows(2)), max_new_tokens=2, exit_rule=KLExit(0.1), do_sample=False)
