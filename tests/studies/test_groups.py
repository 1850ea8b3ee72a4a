from __future__ import annotations

import math
from collections.abc import Callable

from loopformers.studies.groups import Groups, Spread
from loopformers.studies.measures import below_unigram, budget_losses, loss, loss_at, replaced_costs, verdict_step
from loopformers.studies.results import CellResult

Make = Callable[..., CellResult]


def test_cells_that_differ_in_their_seed_are_one_group_in_the_order_of_the_grid(make: Make) -> None:
    groups = Groups([
        make("lt", 12, 1, 6.5), make("flt", 12, 0, 5.0), make("lt", 3, 0, 5.5), make("lt", 12, 0, 6.4), make("lt", 12, 2, 6.2),
    ])  # fmt: skip
    assert [(g.system, g.loops, list(g.by_seed)) for g in groups] == [
        ("lt", 3, [0]), ("lt", 12, [0, 1, 2]), ("flt", 12, [0]),
    ]  # fmt: skip
    assert groups.all[1].spread(loss) == Spread(6.4, 6.2, 6.5)
    assert groups.all[1].verdicts() == "3 collapsed"


def test_a_run_that_diverged_counts_as_an_infinite_loss(make: Make) -> None:
    (group,) = Groups([make("lt", 3, 0, 5.0), make("lt", 3, 1, None), make("lt", 3, 2, 5.5)]).all
    assert group.spread(loss) == Spread(5.5, 5.0, math.inf)
    assert group.verdicts() == "2 stable, 1 exploding"
    assert below_unigram(group.by_seed[1]) == -math.inf


def test_one_pass_is_the_systems_own_or_that_of_any_in_the_variant(make: Make) -> None:
    def variant(system: str, loops: int, attention: str) -> CellResult:
        axes = {"system": system, "loops": loops, "seed": 0, "attention": attention}
        return make(system, loops, 0, 5.0, axes=axes)

    groups = Groups([
        variant("one-pass", 1, "full"), variant("one-pass", 1, "gqa"), variant("lt", 3, "gqa"), variant("flt", 1, "gqa"),
        variant("flt", 3, "gqa"), variant("flt", 3, "mla"),
    ])  # fmt: skip
    beside = {(g.system, g.variant_name): groups.one_pass(g) for g in groups.looped()}
    assert {key: None if once is None else once.label for key, once in beside.items()} == {
        ("lt", "gqa"): "one-pass, gqa", ("flt", "gqa"): "flt, gqa", ("flt", "mla"): None,
    }  # fmt: skip


def test_one_pass_has_as_many_parameters_unless_it_is_the_systems_own(make: Make) -> None:
    deep = make("distinct", 1, 0, 4.5)
    deep = make("distinct", 1, 0, 4.5, run={**deep.run, "num_parameters": 999_999})
    groups = Groups([deep, make("lt", 4, 0, 5.0), make("one-pass", 1, 0, 5.0)])
    looped = groups.find("lt", 4)
    assert looped is not None
    once = groups.one_pass(looped)
    assert once is not None
    assert once.system == "one-pass"
    assert groups.one_pass(groups.all[0]) is groups.all[0]


def test_measures_read_what_was_recorded_and_miss_what_was_not(make: Make) -> None:
    result = make("flt", 4, 0, 5.0)
    assert budget_losses(result) == {1: 5.3, 4: 5.0, 16: 5.1}
    assert (loss_at(1)(result), loss_at(9)(result)) == (5.3, None)
    assert (replaced_costs("swapped")(result), replaced_costs("zeroed")(result)) == (0.5, 0.75)
    assert replaced_costs("swapped")(make("flt", 1, 0, 5.0)) is None
    assert replaced_costs("swapped")(make("flt", 4, 0, None)) is None
    assert verdict_step(result) == 12
    changed = make("flt", 4, 0, 5.0, verdicts=[{"step": 3, "verdict": "oscillating"}])
    assert verdict_step(changed) is None
    assert Spread.of([None, math.nan]) is None


def test_unequal_schedules_are_no_numbers_of_loops(make: Make) -> None:
    budgets = [
        {"num_loops": 2, "schedule": "2/3,1/3", "loss": 9.0},
        {"num_loops": 2, "schedule": "1/2,1/2", "loss": 4.0},
    ]
    result = make("flt", 2, 0, 4.0)
    result = make("flt", 2, 0, 4.0, run={**result.run, "budgets": budgets})
    assert budget_losses(result) == {2: 4.0}
