"""transformers' generate() with a budget: every decoding mode, and what it refuses (faults 2, 3, 23)."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from loopformers import CacheError, ConfigError
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.generation.rules import ArgmaxExit
from loopformers.model.presets import PRESETS
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.testing import tiny_model

RUNS = [
    *((preset, {}) for preset in PRESETS),
    ("flt", {"num_loops": 1}),
    ("lt-input", {"num_loops": 5}),
    ("tmlt", {"num_loops": 2}),
    ("loopformer", {"schedule": "coarse-first:2"}),
    ("elastic-flt", {"schedule": "1/7,2/7,4/7"}),
    ("elastic-flt", {"num_loops": 6}),
]


def prompt(batch=2, length=5):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def greedy_by_hand(model, ids, num_new, **run):
    for _ in range(num_new):
        logits = model(ids, use_cache=False, **run).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids


@pytest.mark.parametrize(("preset", "run"), RUNS, ids=str)
def test_greedy_decoding_equals_a_loop_that_recomputes_everything(preset, run):
    model = tiny_model(preset).double()
    out = model.generate(prompt(), max_new_tokens=6, do_sample=False, **run)
    assert torch.equal(out, greedy_by_hand(model, prompt(), 6, **run))


def test_the_budget_reaches_every_step_of_decoding():
    """Fault 3."""
    model = tiny_model("elastic-flt")
    seen = []
    model.model.conditioning.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    out = model.generate(prompt(), max_new_tokens=3, num_loops=2, return_dict_in_generate=True)
    assert seen == [2]
    assert str(out[CACHE_NAME].schedule) == "1/2,1/2"
    assert len(out[CACHE_NAME]) == model.config.slot_layout.num_slots(2)


@pytest.mark.parametrize("run", [{}, {"num_loops": 2}], ids=str)
def test_left_padded_prompts_generate_what_they_generate_alone(run):
    model = tiny_model("elastic-flt", pad_token_id=0, eos_token_id=60).double()
    ids, mask = prompt(3, 6), torch.ones(3, 6, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0
    together = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **run)
    for row in range(3):
        alone = greedy_by_hand(model, ids[row : row + 1, mask[row].bool()], 5, **run)
        assert torch.equal(together[row, 6:], alone[0, -5:])


def test_sampling_is_seeded_and_beams_find_no_worse_than_greedy():
    model = tiny_model("flt").double()
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(model.generate(prompt(), max_new_tokens=8, do_sample=True, num_loops=2))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])

    def log_likelihood(ids):
        with torch.no_grad():
            log_probabilities = model(ids, num_loops=2).logits[:, :-1].log_softmax(dim=-1)
        return log_probabilities.gather(-1, ids[:, 1:, None])[:, 4:].sum()

    asked = {"max_new_tokens": 4, "do_sample": False, "num_loops": 2, "length_penalty": 0.0}
    greedy, beams = model.generate(prompt(1), **asked), model.generate(prompt(1), num_beams=61, **asked)
    assert log_likelihood(beams) >= log_likelihood(greedy)
    assert model.generate(prompt(), num_beams=3, num_return_sequences=2, **asked).shape == (4, 9)
    assert model.generate(prompt(), do_sample=True, num_beams=2, max_new_tokens=3).shape == (2, 8)


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_sees_every_token():
    model, streamer = tiny_model("elastic-flt"), Collector()
    out = model.generate(prompt(1), max_new_tokens=6, do_sample=False, schedule="fine-first:2", streamer=streamer)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("preset", ["flt", "loopformer", "lt-input"])
@pytest.mark.parametrize("assistant", ["itself", "another", "prompt lookup"])
def test_assisted_decoding_equals_greedy_decoding(preset, assistant):
    """Rejected candidates are cropped from the cache, row by row."""
    model = tiny_model(preset, eos_token_id=60).double()
    helper = {
        "itself": {"assistant_model": model},
        "another": {"assistant_model": tiny_model(preset, seed=1, eos_token_id=60).double()},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
    }[assistant]
    ids = prompt(1, 4).repeat(1, 2)
    out = model.generate(ids, max_new_tokens=12, do_sample=False, num_loops=2, **helper)
    by_hand = greedy_by_hand(model, ids, 12, num_loops=2)
    assert torch.equal(out[:, : out.shape[1]], by_hand[:, : out.shape[1]])
    assert out.shape[1] == 20 or out[0, -1] == 60


def test_decoding_stops_at_the_end_of_text():
    """Fault 23."""
    model = tiny_model("flt").double()
    free = greedy_by_hand(model, prompt(1), 8)[0, 5:].tolist()
    stop = free[3]
    out = model.generate(prompt(1), max_new_tokens=8, do_sample=False, eos_token_id=stop)[0, 5:].tolist()
    assert out == free[: free.index(stop) + 1]


@pytest.mark.filterwarnings("ignore::loopformers.errors.ExitWarning")
@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"do_sample": True}, {"exit_rule": ArgmaxExit(1)}])
def test_decoding_stops_at_a_stop_string(how):
    tokenizer = bundled_tokenizer()
    model = tiny_model("elastic-flt", vocab_size=len(tokenizer), eos_token_id=None)
    ids = torch.tensor([tokenizer("It was").input_ids])
    how = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, **how}
    torch.manual_seed(3)
    free = model.generate(ids, **how)[0].tolist()
    new = [tokenizer.decode(free[ids.shape[1] : end]) for end in range(ids.shape[1] + 1, len(free) + 1)]
    stop = next(character for character in new[-1] if character.isascii() and character.isalnum())
    torch.manual_seed(3)
    stopped = model.generate(ids, **how, stop_strings=[stop], tokenizer=tokenizer)[0].tolist()
    if "num_beams" in how:  # another beam may come first
        assert stop in tokenizer.decode(stopped[ids.shape[1] :])
    else:
        length = next(length for length, text in enumerate(new, start=1) if stop in text)
        assert stopped == free[: ids.shape[1] + length]


def test_scores_logits_and_loop_states_are_returned_on_request():
    model = tiny_model("flt")
    out = model.generate(
        prompt(), max_new_tokens=3, do_sample=False, num_loops=2, return_dict_in_generate=True, output_logits=True,
        output_hidden_states=True,
    )  # fmt: skip
    assert len(out.logits) == len(out.hidden_states) == 3
    assert [len(step) for step in out.hidden_states] == [3, 3, 3]
    with torch.no_grad():
        torch.testing.assert_close(out.logits[0], model(prompt(), num_loops=2).logits[:, -1])


# -- caches ----------------------------------------------------------------------------------------------------


def test_a_given_cache_is_the_one_that_is_filled_and_decoding_goes_on_from_it():
    model = tiny_model("flt").double()
    cache = model.new_cache()
    first = model.generate(prompt(), max_new_tokens=3, do_sample=False, num_loops=2, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 7
    second = model.generate(first, max_new_tokens=3, do_sample=False, num_loops=2, **{CACHE_NAME: cache})
    assert torch.equal(second, greedy_by_hand(model, prompt(), 6, num_loops=2))
    with pytest.raises(CacheError, match="new_cache"):
        model.generate(second, max_new_tokens=1, num_loops=3, **{CACHE_NAME: cache})


@pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized", "offloaded_static"])
def test_caches_of_one_row_a_layer_are_refused_by_name(implementation):
    model = tiny_model("flt")
    with pytest.raises(CacheError, match=f"cache_implementation='{implementation}' has one row a layer.*leave"):
        model.generate(prompt(), max_new_tokens=2, cache_implementation=implementation)


def test_a_cache_of_another_class_is_refused():
    model = tiny_model("flt")
    for cache in (DynamicCache(), ((torch.zeros(1), torch.zeros(1)),)):
        with pytest.raises(CacheError, match=r"one row for each layer.*model\.new_cache\(\)"):
            model.generate(prompt(), max_new_tokens=2, **{CACHE_NAME: cache})
        with pytest.raises(CacheError, match=r"one row for each layer.*model\.new_cache\(\)"):
            model(prompt(), past_key_values=cache)


def test_decoding_without_a_cache_is_the_same():
    model = tiny_model("loopformer").double()
    asked = {"max_new_tokens": 5, "do_sample": False, "schedule": "coarse-first:2"}
    assert torch.equal(model.generate(prompt(), **asked), model.generate(prompt(), use_cache=False, **asked))


# -- what is refused -------------------------------------------------------------------------------------------


def test_typos_and_illegal_budgets_are_refused():
    model = tiny_model("flt")
    with pytest.raises(ValueError, match="num_lops"):
        model.generate(prompt(), max_new_tokens=2, num_lops=2)
    with pytest.raises(ConfigError, match="num_loops=0"):
        model.generate(prompt(), max_new_tokens=2, num_loops=0)
    with pytest.raises(ConfigError, match="does not know step sizes"):
        model.generate(prompt(), max_new_tokens=2, schedule="coarse-first:2")


def test_generation_beyond_the_learned_positions_is_refused_and_rotary_models_go_on():
    with pytest.raises(ConfigError, match="position 40 is beyond the 40 learned positions"):
        tiny_model("loopformer").generate(prompt(1, 36), max_new_tokens=9)
    assert tiny_model("flt").generate(prompt(1, 36), max_new_tokens=9).shape == (1, 45)


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching_is_refused_before_anything_runs(name):
    call = getattr(tiny_model("flt"), name)
    refused = pytest.raises(CacheError, match=r"one row for each layer.*call generate\(\) with a padded batch")
    with refused, contextlib.ExitStack() as stack:
        stack.enter_context(call() if name.endswith("manager") else call([[1, 2, 3], [4, 5]]))
