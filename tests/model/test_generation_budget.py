"""The budget of generate() in the paths that call a model beside the main loop: guidance and assistants."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loopformers import ConfigError
from loopformers.generation import parse_exit_rule
from loopformers.testing import tiny_model

BUDGETS = [{}, {"num_loops": 2}, {"num_loops": 5}, {"schedule": "uniform:1"}]
NUM_NEW = 6


def prompt(length=8):
    return torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4][:length]])


def model_of(preset, **overrides):
    return tiny_model(preset, eos_token_id=60, pad_token_id=0, **overrides).double()


def runs_of(model):
    """Note the schedule of each run of a model."""
    seen, run = [], model.model.run

    def noting(prepared, schedule, **arguments):
        seen.append(str(schedule))
        return run(prepared, schedule, **arguments)

    model.model.run = noting
    return seen


@torch.no_grad()
def guided_by_hand(model, ids, negative, scale, **budget):
    for _ in range(NUM_NEW):
        logits = model(ids, use_cache=False, **budget).logits[:, -1].log_softmax(dim=-1)
        other = model(negative, use_cache=False, **budget).logits[:, -1].log_softmax(dim=-1)
        new = (scale * (logits - other) + other).argmax(dim=-1, keepdim=True)
        ids, negative = torch.cat([ids, new], dim=1), torch.cat([negative, new], dim=1)
    return ids


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_both_halves_of_guidance_run_at_the_budget(budget, use_cache):
    model = model_of("flt")
    negative = torch.tensor([[7, 9, 2]])
    out = model.generate(
        prompt(), guidance_scale=2.5, negative_prompt_ids=negative, max_new_tokens=NUM_NEW, do_sample=False,
        use_cache=use_cache, **budget,
    )  # fmt: skip
    assert torch.equal(out, guided_by_hand(model, prompt(), negative, 2.5, **budget))
    assert not torch.equal(out, model.generate(prompt(), max_new_tokens=NUM_NEW, do_sample=False, **budget))


def test_guidance_follows_a_saved_schedule():
    model = model_of("elastic-flt")
    model.generation_config.schedule = "2/3,1/3"
    seen = runs_of(model)
    model.generate(prompt(), guidance_scale=1.5, max_new_tokens=3, do_sample=False)
    assert set(seen) == {"2/3,1/3"}


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("kind", ["lookup", "looped assistant", "other assistant"])
def test_assisted_decoding_gives_what_the_budget_gives_without(budget, kind):
    model = model_of("flt")
    want = model.generate(prompt(), max_new_tokens=NUM_NEW, do_sample=False, **budget)
    looped = model_of("flt", seed=3)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    helps = {
        "lookup": lambda: {"prompt_lookup_num_tokens": 3},
        "looped assistant": lambda: {"assistant_model": looped},
        "other assistant": lambda: {"assistant_model": LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()},
    }
    of_main, of_assistant = runs_of(model), runs_of(looped)
    out = model.generate(prompt(), max_new_tokens=NUM_NEW, do_sample=False, **helps[kind](), **budget)
    assert torch.equal(out, want)
    asked = {str(model.config.resolve_schedule(**budget))}
    assert set(of_main) == asked
    assert set(of_assistant) == (asked if kind == "looped assistant" else set())


def test_an_early_exit_by_layers_is_refused():
    with pytest.raises(ConfigError, match="assistant_early_exit=1 cuts a stack of layers"):
        model_of("flt").generate(prompt(), max_new_tokens=2, assistant_early_exit=1)


def test_guidance_under_an_exit_rule_is_refused():
    with pytest.raises(ConfigError, match=r"guidance_scale=1\.5 with exit_rule=kl:0\.001.*leave one"):
        model_of("flt").generate(prompt(), max_new_tokens=2, guidance_scale=1.5, exit_rule=parse_exit_rule("kl:1e-3"))
