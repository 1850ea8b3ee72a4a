"""Exit rules: their formulas on numbers that are known by hand, and how they are written."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from loopformers import ConfigError
from loopformers.generation import (
    EXIT_RULES,
    ArgmaxExit,
    EntropyExit,
    KLExit,
    StateChangeExit,
    parse_exit_rule,
)
from loopformers.generation.look import Look


def look(rows):
    return Look(torch.stack(rows), lambda state: state, lambda hidden: hidden)


def scores(rule, *loops):
    memory, found = None, []
    for loop in loops:
        score, memory = rule.score(look(loop), memory)
        found.append(score.tolist())
    return found


def test_kl_is_of_this_loop_from_the_last():
    finite = [torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()]
    first, second = scores(KLExit(0.1), [finite[0]], [finite[1]])
    assert first == [math.inf]
    assert second[0] == pytest.approx(0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5), rel=1e-5)


def test_kl_of_nearly_equal_predictions_is_not_negative():
    torch.manual_seed(0)
    logits = torch.randn(64, 300)
    nearly = logits * (1 + 1e-7 * torch.randn(64, 300))
    p, q = nearly.log_softmax(-1), logits.log_softmax(-1)
    assert ((p.exp() * (p - q)).sum(-1) < 0).any()  # rounding alone
    assert min(scores(KLExit(0), list(logits), list(nearly))[1]) >= 0


def test_entropy_changes_in_nats_and_in_either_direction():
    def entropy(p):
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    finite = [torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()]
    found = scores(EntropyExit(0.1), finite, finite[::-1])
    assert found[0] == [math.inf] * 2
    assert found[1] == pytest.approx([entropy(0.5) - entropy(0.25)] * 2, rel=1e-5)


def test_state_change_is_relative_to_the_new_state():
    found = scores(StateChangeExit(0.1), [torch.tensor([3.0, 0.0])], [torch.tensor([3.0, 4.0])], [torch.zeros(2)])
    assert found[:2] == [[math.inf], [pytest.approx(4 / 5)]]
    assert found[2][0] > 1e30  # of a state of zero nothing is relative, and nothing is no number


def test_state_change_asks_for_no_logits():
    seen = Look(torch.ones(2, 3), lambda state: 1 / 0, lambda hidden: 1 / 0)
    StateChangeExit(0.1).score(seen, None)
    assert not seen.has_logits


def test_patience_counts_loops_without_a_change_and_starts_over_after_one():
    a, b = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])
    found = scores(ArgmaxExit(2), [a, a], [a, b], [a, b], [b, b])
    assert found == [[math.inf] * 2, [-1, 0], [-2, -1], [0, -2]]
    assert ArgmaxExit(2).threshold == -2


@pytest.mark.parametrize("text", ["kl:0.0005", "entropy:0.01", "state:0.2", "argmax:3"])
def test_a_rule_is_written_as_it_is_read(text):
    rule = parse_exit_rule(text)
    assert str(rule) == text
    assert rule == parse_exit_rule(f" {text} ")
    assert type(rule) is EXIT_RULES[text.split(":")[0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("klx:5e-4", "exit rule='klx' is not known; did you mean 'kl'"),
        ("kl", "'' is no number that it takes; write for example kl:5e-4"),
        ("kl:x", "'x' is no number"),
        ("kl:-1", "threshold=-1.0 of exit rule 'kl' must be a number of at least 0"),
        ("state:nan", "a threshold of nan"),
        ("argmax:1.5", "'1.5' is no number that it takes; write for example argmax:2"),
        ("argmax:0", "patience=0 must be a whole number of at least 1"),
        ("", "exit rule='' is not known"),
    ],
)
def test_what_is_no_rule_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_exit_rule(text)


def test_the_package_imports_no_torch_until_it_is_used():
    code = "import sys, loopformers.generation; assert 'torch' not in sys.modules; loopformers.generation.KLExit(1e-3)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there_is_an_attribute_error():
    import loopformers.generation

    with pytest.raises(AttributeError, match="KLExits"):
        _ = loopformers.generation.KLExits
