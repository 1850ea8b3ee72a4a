"""What a forward call refuses before any work, in both models, and what it must still take."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loopformers import CacheError, ConfigError
from loopformers.generation import parse_exit_rule
from loopformers.testing import tiny_model

VOCAB = 61


def tokens(batch=2, length=5):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))


def changed(tensor, value, at=(1, 2)):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


IDS = tokens()
EMBEDS = torch.zeros(2, 5, 24)
ONES = torch.ones(2, 5, dtype=torch.long)
POSITIONS = torch.arange(5).expand(2, 5)

BAD_INPUTS = {
    "id beyond the vocabulary": ({"input_ids": changed(IDS, VOCAB)}, r"hold 61, and this model knows tokens 0 to 60"),
    "id far beyond, in a long row": ({"input_ids": changed(tokens(2, 300), 10**9)}, "hold 1000000000, .* 0 to 60"),
    "negative id": ({"input_ids": changed(IDS, -1)}, "hold -1, and this model knows"),
    "label as an id": ({"input_ids": changed(IDS, -100)}, "hold -100"),
    "float ids": ({"input_ids": IDS.float()}, r"dtype torch.float32 must be token ids.*call .long\(\)"),
    "boolean ids": ({"input_ids": IDS > 3}, "dtype torch.bool must be token ids"),
    "ids of one row": ({"input_ids": IDS[0]}, r"shape \(5,\) must be \(batch, seq\); for one sequence give input_ids\[None\]"),
    "ids of three dimensions": ({"input_ids": IDS[None]}, r"shape \(1, 2, 5\) must be \(batch, seq\)$"),
    "no rows": ({"input_ids": IDS[:0]}, "0 rows has nothing to run"),
    "no tokens": ({"input_ids": IDS[:, :0]}, "0 tokens has nothing to predict from"),
    "a list of ids": ({"input_ids": [[1, 2]]}, r"input_ids is a list, and must be a tensor: token ids, \(batch, seq\)"),
    "both": ({"input_ids": IDS, "inputs_embeds": EMBEDS}, "exactly one of input_ids and inputs_embeds"),
    "embeddings of another width": ({"inputs_embeds": EMBEDS[..., :23]}, r"shape \(2, 5, 23\) must be \(batch, seq, 24\)"),
    "embeddings of one row": ({"inputs_embeds": EMBEDS[0]}, r"shape \(5, 24\) must be \(batch, seq, 24\)"),
    "embeddings of another dtype": (
        {"inputs_embeds": EMBEDS.double()}, r"dtype torch.float64 must be torch.float32, as this model is; call .to"
    ),
    "whole embeddings": ({"inputs_embeds": EMBEDS.long()}, "dtype torch.int64 must be .*; ids go into input_ids"),
    "no rows of embeddings": ({"inputs_embeds": EMBEDS[:0]}, "0 rows"),
    "mask of NaN": ({"input_ids": IDS, "attention_mask": changed(ONES.float(), float("nan"))}, "holds nan; it must be 1 for"),
    "mask of 2": ({"input_ids": IDS, "attention_mask": changed(ONES, 2)}, "attention_mask holds 2; it must be 1 for text"),
    "mask of -1": ({"input_ids": IDS, "attention_mask": changed(ONES, -1)}, "attention_mask holds -1"),
    "additive mask": ({"input_ids": IDS, "attention_mask": changed(ONES.float(), -1e9)}, r"holds -1\d*.*1 for text"),
    "a half": ({"input_ids": IDS, "attention_mask": changed(ONES.float(), 0.5)}, "holds 0.5"),
    "mask of four dimensions": (
        {"input_ids": IDS, "attention_mask": ONES[:, None, None].expand(2, 1, 5, 5)},
        r"shape \(2, 1, 5, 5\) says which query sees which key, and the model makes that itself; give \(2, 5\)",
    ),
    "mask of one row": ({"input_ids": IDS, "attention_mask": ONES[0]}, r"shape \(5,\) must be \(2, 5\)"),
    "mask of other rows": ({"input_ids": IDS, "attention_mask": ONES[:1]}, r"shape \(1, 5\) must be \(2, 5\)"),
    "mask by name": ({"input_ids": IDS, "attention_mask": {"full_attention": ONES}}, "attention_mask is a dict"),
    "negative position": ({"input_ids": IDS, "position_ids": changed(POSITIONS, -1)}, "position_ids hold -1; .* from 0"),
    "float positions": ({"input_ids": IDS, "position_ids": POSITIONS.float()}, "position_ids of dtype torch.float32 must"),
    "positions of other tokens": ({"input_ids": IDS, "position_ids": POSITIONS[:, :4]}, r"shape \(2, 4\) must be \(2, 5\)"),
    "a list of positions": ({"input_ids": IDS, "position_ids": [0, 1]}, "position_ids is a list"),
    "float loops": ({"input_ids": IDS, "num_loops": 2.0}, "num_loops=2.0 must be a whole number"),
    "text for loops": ({"input_ids": IDS, "num_loops": "2"}, "num_loops='2' must be a whole number"),
    "loops of several": ({"input_ids": IDS, "num_loops": torch.tensor([1, 2])}, "num_loops=tensor.* must be a whole number"),
    "a fraction of loops": ({"input_ids": IDS, "num_loops": torch.tensor(1.5)}, "num_loops=tensor.* must be a whole number"),
    "a number for a schedule": ({"input_ids": IDS, "schedule": 3}, "schedule=3 must be a Schedule, text such as"),
    "bytes for a schedule": ({"input_ids": IDS, "schedule": b"11"}, "schedule=b'11' must be a Schedule, text such as"),
    "a set for a schedule": ({"input_ids": IDS, "schedule": {1, 2}}, "schedule={1, 2} must be a Schedule, text such as"),
    "NaN in a schedule": ({"input_ids": IDS, "schedule": [float("nan"), 1]}, "has the step size nan, which is not a number"),
}  # fmt: skip

BAD_LABELS = {
    "labels of another length": ({"labels": IDS[:, :4]}, r"labels of shape \(2, 4\) must be \(2, 5\).*put -100"),
    "labels of other rows": ({"labels": IDS[:1]}, r"labels of shape \(1, 5\) must be \(2, 5\)"),
    "float labels": ({"labels": IDS.float()}, "labels of dtype torch.float32 must be token ids"),
    "label beyond the vocabulary": ({"labels": changed(IDS, VOCAB)}, "labels hold 61, .* tokens 0 to 60; put -100"),
    "label of another negative": ({"labels": changed(changed(IDS, -100), -1, (0, 3))}, "labels hold -1"),
    "label below -100": ({"labels": changed(IDS, -101)}, "labels hold -101"),
    "a list of labels": ({"labels": IDS.tolist()}, "labels is a list"),
    "target beyond the vocabulary": ({"targets": changed(IDS, 99)}, "targets hold 99"),
    "targets of another length": ({"targets": IDS[:, 1:]}, r"targets of shape \(2, 4\)"),
}

BAD_POSITIONS_TO_KEEP = {
    "-3": (-3, "logits_to_keep=-3 must be a whole number of at least 0"),
    "true": (True, "logits_to_keep=True must be"),
    "2.0": (2.0, r"logits_to_keep=2\.0 must be"),
    "none": (None, "logits_to_keep=None must be"),
    "float indices": (torch.tensor([0.0]), "logits_to_keep of dtype torch.float32"),
    "one index": (torch.tensor(2), r"shape \(\) must be indices"),
    "an index too far": (torch.tensor([0, 5]), "holds 5, and there are 5 positions, 0 to 4"),
    "an index too low": (torch.tensor([-6]), "holds -6"),
}


@pytest.fixture(scope="module", params=["flt", "loopformer"])
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("case", BAD_INPUTS)
@pytest.mark.parametrize("whole", [True, False], ids=["with head", "trunk"])
def test_a_bad_input_names_the_value_the_rule_and_the_remedy(case, whole, model):
    given, match = BAD_INPUTS[case]
    with pytest.raises(ConfigError, match=match):
        (model if whole else model.model)(**given)


@pytest.mark.parametrize("case", BAD_LABELS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_bad_labels_name_the_value_the_rule_and_the_remedy(case, training, model):
    given, match = BAD_LABELS[case]
    try:
        with pytest.raises(ConfigError, match=match):
            model.train(training)(IDS, **given)
    finally:
        model.eval()


@pytest.mark.parametrize("case", BAD_POSITIONS_TO_KEEP)
def test_bad_positions_to_keep_are_refused(case, model):
    value, match = BAD_POSITIONS_TO_KEEP[case]
    with pytest.raises(ConfigError, match=match):
        model(IDS, logits_to_keep=value)


@pytest.mark.filterwarnings("ignore::loopformers.errors.ExitWarning")
@pytest.mark.parametrize(
    "case", ["ids of one row", "negative id", "mask of 2", "no rows", "embeddings of another width"]
)
def test_an_exit_rule_does_not_go_round_the_checks(case, model):
    given, match = BAD_INPUTS[case]
    with pytest.raises(ConfigError, match=match):
        model(**given, exit_rule=parse_exit_rule("kl:1e-3"))


@pytest.mark.parametrize("case", ["negative id", "mask of 2", "negative position", "float ids"])
def test_a_refused_call_leaves_a_cache_as_it_was(case, model):
    cache = model.new_cache()
    with torch.no_grad():
        model(IDS, cache=cache)
        want = model(IDS[:, :2], cache=cache).logits
        cache.crop(-2)
        given, match = BAD_INPUTS[case]
        with pytest.raises(ConfigError, match=match):
            model(**given, cache=cache)
        assert cache.get_seq_length() == 5
        assert torch.equal(model(IDS[:, :2], cache=cache).logits, want)


def test_two_caches_are_not_one(model):
    with pytest.raises(CacheError, match="two names of one argument"):
        model(IDS, past_key_values=model.new_cache(), cache=model.new_cache())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32])
def test_zeros_and_ones_of_any_dtype_are_a_mask(dtype, model):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert torch.equal(model(IDS, attention_mask=mask.to(dtype)).logits, model(IDS, attention_mask=mask).logits)


def test_int32_ids_and_labels_are_as_good_as_int64(model):
    labels = changed(IDS, -100)
    assert torch.equal(model(IDS.int(), labels=labels.int()).loss, model(IDS, labels=labels).loss)


def test_positions_of_one_row_serve_all(model):
    want = model(IDS, position_ids=POSITIONS).logits
    assert torch.equal(model(IDS, position_ids=torch.arange(5)[None]).logits, want)


def test_indices_and_more_positions_than_there_are_can_be_kept(model):
    whole = model(IDS).logits
    assert torch.equal(model(IDS, logits_to_keep=9).logits, whole)
    torch.testing.assert_close(model(IDS, logits_to_keep=torch.tensor([0, -1])).logits, whole[:, [0, -1]])


def test_autocast_takes_embeddings_of_its_own_dtype(model):
    embeds = model.get_input_embeddings()(IDS).bfloat16()
    with pytest.raises(ConfigError, match=re.escape("dtype torch.bfloat16 must be torch.float32")):
        model(inputs_embeds=embeds)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs_embeds=embeds).logits.shape == (2, 5, VOCAB)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_values_are_not_looked_at_where_there_are_none(model):
    """A trace, a fake tensor, the meta device and torch.func have shapes and no numbers."""

    def logits(ids):
        return model(ids, use_cache=False).logits

    want = logits(IDS)
    assert torch.equal(torch.compile(logits, backend="aot_eager", fullgraph=True)(IDS), want)
    torch.testing.assert_close(torch.func.vmap(logits)(IDS[:, None])[:, 0], want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert logits(mode.from_tensor(IDS)).shape == want.shape
    with torch.device("meta"):
        apart = tiny_model("flt")
    assert apart(IDS.to("meta"), labels=IDS.to("meta"), use_cache=False).logits.shape == (2, 5, VOCAB)


def test_a_model_can_be_exported(model):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    exported = torch.export.export(Logits(), (IDS,), strict=False)
    torch.testing.assert_close(exported.module()(IDS), model(IDS).logits)


@pytest.mark.parametrize(
    "value", [-3, float("nan"), "4", True, torch.tensor(-1), torch.tensor([4, 5]), torch.tensor(True)]
)
def test_a_number_of_targets_is_one_number_of_at_least_zero(value, model):
    with pytest.raises(ConfigError, match=r"num_items_in_batch.*one number of at least 0"):
        model(tokens(), labels=tokens(), num_items_in_batch=value)


def test_a_number_of_targets_with_a_dimension_leaves_a_loss_without_one(model):
    """Trainers that copy a model over devices cut this number up as they do a batch."""
    plain = model(tokens(), labels=tokens(), num_items_in_batch=6).loss
    assert torch.equal(model(tokens(), labels=tokens(), num_items_in_batch=torch.tensor([6])).loss, plain)


def test_a_step_without_targets_has_a_loss_of_zero(model):
    assert model(tokens(), labels=torch.full_like(tokens(), -100), num_items_in_batch=0).loss == 0
