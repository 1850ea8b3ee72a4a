from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import GPT2Config, GPT2LMHeadModel

from loopformers.errors import ConfigError, DataError, NonFiniteError
from loopformers.evaluation.harness import LoopformersLM, register
from loopformers.testing import tiny_model
from tests.tokenizer_styles import STYLES, save_style

WORDS = [
    "the",
    "sea",
    "was",
    "grey",
    "and",
    "nobody",
    "came",
    "to",
    "see",
    "an",
    "old",
    "house",
    "by",
    "water",
    "when",
    "winter",
    "ended",
]
TOLERANCE = 1e-5
"""Nats that batching may move a score by."""


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args, task_name=None)


def text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


@pytest.fixture(scope="module")
def questions() -> list[Any]:
    """Contexts of many lengths with one to four choices each; one question without context, one too long."""
    draw = random.Random(0)
    found = []
    for _ in range(9):
        context = text(draw, draw.randint(1, 14))
        found += [request(context, " " + text(draw, draw.randint(1, 6))) for _ in range(draw.choice([1, 2, 4]))]
    long = text(draw, 90)
    return [*found, request("", " the sea"), request(long, " the sea"), request(long, " grey"), request("Is it", " so")]


def one_by_one(model: Any, tokenizer: Any, requests: list[Any], **run: Any) -> list[tuple[float, bool]]:
    """The slow truth: each sequence alone, whole, without cache or padding, in float64."""
    lm = LoopformersLM(model, tokenizer=tokenizer)
    limit = model.config.max_position_embeddings
    answers = []
    for item in requests:
        context, continuation = item.args
        before, scored = (
            lm._encode_pair(context, continuation)
            if context
            else ([tokenizer.bos_token_id], tokenizer.encode(continuation))
        )
        ids = torch.tensor([(before + scored)[-(limit + 1) :]])
        with torch.no_grad():
            logits = model(ids[:, :-1], use_cache=False, **run).logits[0, -len(scored) :].double()
        chosen = logits.log_softmax(-1).gather(1, ids[0, -len(scored) :, None])
        answers.append((float(chosen.sum()), bool((logits.argmax(-1) == ids[0, -len(scored) :]).all())))
    return answers


def assert_equal_scores(got: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [hit for _, hit in got] == [hit for _, hit in expected]
    assert max(abs(a - b) for (a, _), (b, _) in zip(got, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize("preset", ["elastic-flt", "lt", "loopformer"])
@pytest.mark.parametrize(("batch_size", "share"), [(1, True), (5, False), (5, True), (64, True)])
def test_batches_and_shared_contexts_score_as_each_sequence_alone(preset, batch_size, share, questions, tokenizer):
    model = tiny_model(preset, vocab_size=len(tokenizer), max_position_embeddings=61)
    lm = LoopformersLM(model, tokenizer=tokenizer, batch_size=batch_size, share_contexts=share)
    assert_equal_scores(lm.loglikelihood(questions), one_by_one(model, tokenizer, questions))
    assert lm.num_cut == 2


@pytest.mark.parametrize("run", [{"num_loops": 1}, {"num_loops": 5}, {"schedule": "1/2,1/4,1/4"}])
def test_scores_are_those_of_the_schedule_that_was_asked_for(run, elastic, questions, tokenizer):
    lm = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=7, **run)
    got = lm.loglikelihood(questions)
    assert_equal_scores(got, one_by_one(elastic, tokenizer, questions, **run))
    trained = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=7).loglikelihood(questions)
    assert max(abs(a[0] - b[0]) for a, b in zip(got, trained, strict=True)) > 0.1


def test_step_sizes_may_be_joined_by_plus_signs_as_commas_separate_the_harnesss_arguments(elastic, tokenizer):
    lm = LoopformersLM(elastic, tokenizer=tokenizer, schedule="1/2+1/4+1/4")
    assert str(lm.run_arguments["schedule"]) == "2/4,1/4,1/4"


def test_a_context_runs_once_for_all_its_choices(elastic, tokenizer, monkeypatch):
    lm = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=8)
    seen: list[tuple[int, ...]] = []
    whole = elastic.forward
    monkeypatch.setattr(elastic, "forward", lambda ids, **given: seen.append(tuple(ids.shape)) or whole(ids, **given))
    context = "the sea was grey and nobody came to see the old house"
    lm.loglikelihood(
        [request(context, f" {choice}") for choice in ("by the water", "in winter", "when it ended", "so")]
    )
    assert [rows for rows, _ in seen] == [1, 4]
    assert seen[0][1] == len(tokenizer.encode(context))


def test_other_models_are_scored_as_the_harnesss_own_backend_scores_them(questions, tokenizer, caplog):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=2, n_head=4, n_positions=61)
    model = GPT2LMHeadModel(config).eval()
    caplog.set_level(logging.ERROR)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5).loglikelihood(questions, disable_tqdm=True)
    ours = LoopformersLM(model, tokenizer=tokenizer, batch_size=5)
    assert_equal_scores(ours.loglikelihood(questions), theirs)
    assert not ours.share_contexts


def test_rolling_windows_score_each_token_once_with_as_much_context_as_fits(elastic, tokenizer):
    story = text(random.Random(1), 130)
    ids = tokenizer.encode(story)
    limit = elastic.config.max_position_embeddings
    assert len(ids) > 2 * limit
    expected = 0.0
    tokens = [tokenizer.bos_token_id, *ids]
    for start in range(0, len(ids), limit):
        stop = min(start + limit, len(ids))
        window = torch.tensor([tokens[stop - limit if start else 0 : stop + 1]])
        with torch.no_grad():
            logits = elastic(window[:, :-1], use_cache=False).logits[0].double().log_softmax(-1)
        expected += float(logits.gather(1, window[0, 1:, None])[-(stop - start) :].sum())
    for batch_size in (1, 3):
        lm = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=batch_size)
        (got,) = lm.loglikelihood_rolling([request(story)])
        assert got == pytest.approx(expected, abs=1e-4 * len(ids) / 100)


def test_a_choice_longer_than_the_model_sees_is_scored_in_windows(elastic, tokenizer):
    choice = " " + text(random.Random(2), 70)
    lm = LoopformersLM(elastic, tokenizer=tokenizer)
    (got,) = lm.loglikelihood([request("", choice)])
    (rolling,) = lm.loglikelihood_rolling([request(choice)])
    assert got[0] == pytest.approx(rolling, abs=TOLERANCE)


def test_generation_stops_at_a_stop_string_and_batches_change_nothing(elastic, tokenizer):
    prompts = [text(random.Random(3), n) for n in (3, 11, 6)]
    free = [request(p, {"until": [], "max_gen_toks": 9}) for p in prompts]
    alone = LoopformersLM(elastic, tokenizer=tokenizer, num_loops=2).generate_until(free)
    together = LoopformersLM(elastic, tokenizer=tokenizer, num_loops=2, batch_size=3).generate_until(free)
    assert together == alone
    stop = alone[0][2:4]
    (stopped,) = LoopformersLM(elastic, tokenizer=tokenizer, num_loops=2).generate_until(
        [request(prompts[0], {"until": [stop], "max_gen_toks": 9})]
    )
    assert stopped == alone[0].split(stop)[0]


def test_generation_runs_the_schedule_that_was_asked_for(elastic, tokenizer):
    asked = [request("the sea was", {"until": [], "max_gen_toks": 8})]
    (got,) = LoopformersLM(elastic, tokenizer=tokenizer, schedule="fine-first:2").generate_until(asked)
    ids = torch.tensor([tokenizer.encode("the sea was")])
    direct = elastic.generate(ids, schedule="fine-first:2", max_new_tokens=8, do_sample=False)
    assert got == tokenizer.decode(direct[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_chat_template_is_the_tokenizers(elastic, tokenizer, monkeypatch):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    lm = LoopformersLM(elastic, tokenizer=tokenizer)
    assert lm.apply_chat_template([{"role": "user", "content": "Is it so?"}]) == "[user] Is it so?"


@pytest.mark.filterwarnings("ignore::loopformers.errors.ExitWarning")
def test_an_exit_rule_that_nobody_takes_scores_as_the_full_run(elastic, questions, tokenizer):
    never = LoopformersLM(elastic, tokenizer=tokenizer, exit_rule="kl:1e-12", batch_size=4)
    full = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=4).loglikelihood(questions[:8])
    early = LoopformersLM(elastic, tokenizer=tokenizer, exit_rule="kl:1e9", batch_size=4)
    assert_equal_scores(never.loglikelihood(questions[:8]), full)
    moved = zip(early.loglikelihood(questions[:8]), full, strict=True)
    assert max(abs(a[0] - b[0]) for a, b in moved) > 0.1
    asked = [request("the sea was", {"until": [], "max_gen_toks": 8})]
    shallow = LoopformersLM(elastic, tokenizer=tokenizer).generate_until(asked)
    assert never.generate_until(asked) == shallow != early.generate_until(asked)


@pytest.mark.parametrize(("size", "searches"), [("auto", 1), ("auto:3", 3)])
def test_an_automatic_batch_size_is_searched_for_and_moves_no_score(
    size, searches, elastic, tokenizer, questions, monkeypatch
):
    fixed = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=5).loglikelihood(questions)
    lm = LoopformersLM(elastic, tokenizer=tokenizer, batch_size=size, max_batch_size=7)
    run, sizes, searched = lm._run, [], []
    search = lm._detect_batch_size

    def limited(ids, *arguments, **options):
        if len(ids) > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        sizes.append(len(ids))
        return run(ids, *arguments, **options)

    monkeypatch.setattr(lm, "_run", limited)
    monkeypatch.setattr(lm, "_detect_batch_size", lambda requests: searched.append(1) or search(requests))
    answers = lm.loglikelihood(questions)
    assert len(searched) == searches
    assert max(sizes) > 1
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in fixed]
    assert [nats for nats, _ in answers] == pytest.approx([nats for nats, _ in fixed], abs=TOLERANCE)


def test_likelihoods_that_are_not_finite_are_an_error(tokenizer, questions):
    model = tiny_model("elastic-flt", vocab_size=len(tokenizer), max_position_embeddings=61)
    model.lm_head.weight.data[3, 2] = float("nan")
    lm = LoopformersLM(model, tokenizer=tokenizer, num_loops=2)
    with pytest.raises(NonFiniteError, match="likelihoods are not finite at schedule 1/2,1/2"):
        lm.loglikelihood(questions)


def test_a_number_of_loops_among_generation_arguments_is_refused(elastic, tokenizer):
    lm = LoopformersLM(elastic, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="num_loops among generation arguments"):
        lm.generate_until([request("the sea", {"max_gen_toks": 3, "until": [], "num_loops": 1})])


def test_a_chat_template_that_is_not_there_is_refused(elastic, tokenizer):
    lm = LoopformersLM(elastic, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="no chat template; leave --apply_chat_template out"):
        lm.apply_chat_template([{"role": "user", "content": "the sea"}])
    with pytest.raises(ConfigError, match="no chat template"):
        lm.chat_template(True)


def test_the_harness_knows_our_model_by_name():
    from lm_eval.api.registry import get_model

    register()
    register()
    assert get_model("loopformers") is LoopformersLM
    assert get_model("hf") is HFLM


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_loops": 0}, "num_loops=0"),
        ({"schedule": "1/2+1/3"}, "must sum to 1"),
        ({"batch_size": "automatic"}, "batch_size='automatic' must be a whole number, auto, or auto:N"),
        ({"batch_size": "auto:0"}, "batch_size='auto:0'"),
        ({"batch_size": "auto:x"}, "batch_size='auto:x'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"trust_remote_code": True}, "trust_remote_code=True: code in a checkpoint never runs"),
        ({"num_loop": 4}, "model argument='num_loop' is not known; did you mean 'num_loops'"),
        ({"load_in_8bit": True}, "model argument='load_in_8bit' is not known"),
        ({"max_length": 1}, "max_length=1"),
        ({"exit_rule": "never"}, "exit rule='never'"),
    ],
)
def test_bad_arguments_are_refused(options, text, elastic, tokenizer):
    with pytest.raises(ConfigError, match=text):
        LoopformersLM(elastic, tokenizer=tokenizer, **options)


def test_more_tokens_than_learned_positions_are_refused(tokenizer):
    model = tiny_model("loopformer", vocab_size=len(tokenizer))
    with pytest.raises(ConfigError, match="max_length=41 is more than the 40 positions"):
        LoopformersLM(model, tokenizer=tokenizer, max_length=41)


def test_a_budget_for_a_model_without_loops_is_refused(tokenizer):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=1, n_head=4, n_positions=17))
    with pytest.raises(ConfigError, match="num_loops=3 for a gpt2 model, which has no loops"):
        LoopformersLM(model, tokenizer=tokenizer, num_loops=3)


def test_an_answer_longer_than_the_model_sees_is_refused(elastic, tokenizer):
    lm = LoopformersLM(elastic, tokenizer=tokenizer)
    with pytest.raises(DataError, match="asks for 256 new tokens and the model sees 61"):
        lm.generate_until([request("the sea", {"until": ["."]})])


# -- tokenizers whose template begins and ends texts -------------------------------------------------------------------


@pytest.fixture(scope="module")
def framed() -> Any:
    """A model of another kind, whose tokenizer puts `<s>` before and `</s>` behind each text."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=2050, n_embd=24, n_layer=1, n_head=4, n_positions=61)).eval()


def test_contexts_begin_as_the_tokenizer_begins_texts_and_no_end_token_closes_them(framed):
    tokenizer = STYLES["llama"]()
    bare = tokenizer("the sea was", add_special_tokens=False)["input_ids"]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    lm = LoopformersLM(framed, tokenizer=tokenizer, batch_size=2)
    assert lm.tok_encode("the sea was") == lm.tok_encode("<s>the sea was") == [start, *bare]
    assert lm.tok_encode("the sea was", add_special_tokens=False) == bare
    assert lm.tok_encode("the sea was", left_truncate_len=2) == bare[-2:]
    context, continuation = lm._encode_pair("the sea was", " grey")
    assert context == [start, *bare]
    assert continuation == tokenizer(" grey", add_special_tokens=False)["input_ids"], "something is scored, and no end"
    ids, mask = lm.tok_batch_encode(["the sea was", "the"])
    assert ids[0].tolist() == [start, *bare]
    assert end not in ids[:, 0] or mask[1, 0] == 0
    assert ids[1][mask[1].bool()].tolist() == [start, *tokenizer("the", add_special_tokens=False)["input_ids"]]
    assert lm.prefix_token_id == start


def test_a_rolling_text_has_one_start_token(framed):
    tokenizer = STYLES["llama"]()
    ids = [tokenizer.bos_token_id, *tokenizer("the sea was grey", add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        nats = framed(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = float(nats[:-1].gather(1, torch.tensor(ids)[1:, None]).sum())
    lm = LoopformersLM(framed, tokenizer=tokenizer)
    assert lm.loglikelihood_rolling([request("the sea was grey")]) == [pytest.approx(expected, abs=1e-4)]
    assert lm.begin_tokens == (tokenizer.bos_token_id,)


@pytest.mark.parametrize(
    ("style", "asked", "begin"), [("llama", False, ""), ("llama", True, "<s>"), ("gpt2", True, "<|endoftext|>")]
)
def test_a_start_token_is_added_or_left_out_as_asked(style, asked, begin, framed):
    tokenizer = STYLES[style]()
    lm = LoopformersLM(framed, tokenizer=tokenizer, add_bos_token=asked)
    assert tokenizer.decode(lm.tok_encode("the sea")) == begin + "the sea"


def test_a_start_token_that_the_tokenizer_has_not_is_refused(framed):
    tokenizer = STYLES["gpt2"]()
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="add_bos_token=True, but the tokenizer has no start token"):
        LoopformersLM(framed, tokenizer=tokenizer, add_bos_token=True)


def test_a_model_takes_the_folder_of_a_tokenizer_and_needs_one(framed, tmp_path):
    lm = LoopformersLM(framed, tokenizer=save_style("llama", tmp_path))
    assert lm.tokenizer.eos_token == "</s>"
    with pytest.raises(ConfigError, match="brings no tokenizer"):
        LoopformersLM(framed)
