from __future__ import annotations

import pytest

from loopformers.environment import VARIABLES, check_variables
from loopformers.errors import ConfigError

FIELDS = ("LOOPFORMERS_MODEL__NUM_LOOPS", "LOOPFORMERS_TRAINING__STEPS", "LOOPFORMERS_LAW")


def test_known_variables_and_those_of_others_pass() -> None:
    others = {"LOOPFORMERS_HOME": "x", "LOOPFORMERSX": "", "OTHER_MODLE__NUM_LOOPS": "3"}
    check_variables({**dict.fromkeys(VARIABLES, "1"), **dict.fromkeys(FIELDS, "1"), **others}, FIELDS)


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("LOOPFORMERS_MODLE__NUM_LOOPS", "LOOPFORMERS_MODEL__NUM_LOOPS"),
        ("LOOPFORMERS_TRAINIG__STEPS", "LOOPFORMERS_TRAINING__STEPS"),
        ("LOOPFORMERS_model__num_loops", "LOOPFORMERS_MODEL__NUM_LOOPS"),
        ("LOOPFORMERS_DEBGU", "LOOPFORMERS_DEBUG"),
        ("LOOPFORMERS_IMPORTS", "LOOPFORMERS_IMPORT"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest(variable: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} has no effect.*did you mean {near}"):
        check_variables({variable: "3"}, FIELDS)
