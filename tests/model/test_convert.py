"""Official checkpoint files, made here in their layouts from the goldens' weights: read, converted, or refused whole."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loopformers import CheckpointError, ConfigError, LoopedForCausalLM, from_official
from loopformers.model import convert
from loopformers.model.convert import convert_checkpoint, read_official

PARITY = Path(__file__).parents[1] / "parity"
FLT_CASES = ["flt_LT_i", "flt_FLT", "flt_FLT_gqa", "flt_FLT_mla", "flt_FLT_swa"]
LOOPFORMER_CASES = ["lf_base", "lf_base_loop", "lf_tmlt", "lf_loopformer"]


def golden(name):
    case = json.loads((PARITY / f"{name}.json").read_text())
    stored = load_file(PARITY / f"{name}.safetensors")
    return case, {key.removeprefix("weights."): t for key, t in stored.items() if key.startswith("weights.")}


def prefixed(weights, prefix):
    return {prefix + name: tensor for name, tensor in weights.items()}


@torch.no_grad()
def logits_of(model):
    return model.eval()(torch.arange(24).view(2, 12)).logits


def write_flt(folder, name="flt_FLT", step=120):
    """A folder as the FLT code writes it: compiled names, a bfloat16 embedding, optimiser files beside."""
    case, weights = golden(name)
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"].bfloat16()
    folder.mkdir()
    torch.save(prefixed(weights, "_orig_mod."), folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": case, "val_bpb": 1.5}))
    (folder / f"optim_{step:06d}_rank0.pt").write_bytes(b"not ours to read")
    return case, weights


def write_loopformer(folder, name="lf_loopformer"):
    """A ckpt.pt as the LoopFormer code writes it: its configuration is a pickled dataclass of a module that we lack."""
    case, weights = golden(name)
    arguments = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    fields = [(field, object, dataclasses.field(default=None)) for field in arguments]
    module_name = f"models.{case['kind']}"
    modules = {"models": types.ModuleType("models"), module_name: types.ModuleType(module_name)}
    config_class = dataclasses.make_dataclass("GPTConfig", fields)
    config_class.__module__ = module_name
    modules[module_name].GPTConfig = config_class
    model_args = {field: case.get(field) for field in arguments}
    payload = {
        "model": prefixed(weights | {"lm_head.weight": weights["transformer.wte.weight"]}, "_orig_mod."),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "model_args": model_args,
        "iter_num": 700,
        "val_iter_num": 7,
        "best_val_loss": torch.tensor(2.5),
        "config": config_class(**model_args),
    }
    folder.mkdir()
    sys.modules.update(modules)
    try:
        torch.save(payload, folder / "ckpt.pt")
    finally:
        for module in modules:
            del sys.modules[module]
    return case, weights


# -- what converts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLT_CASES)
def test_an_flt_folder_converts_and_loads_through_auto_classes(name, tmp_path):
    case, weights = write_flt(tmp_path / "official", name)
    config = convert_checkpoint(tmp_path / "official", tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert config.num_loops == model.config.num_loops == max(case["K"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(logits_of(model), logits_of(from_official(weights, case)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official", "ours"]


@pytest.mark.parametrize("name", LOOPFORMER_CASES)
def test_a_loopformer_checkpoint_converts_with_the_users_loop_count(name, tmp_path):
    case, weights = write_loopformer(tmp_path / "official", name)
    loops = {} if name == "lf_base" else {"num_loops": 8}
    convert_checkpoint(tmp_path / "official" / "ckpt.pt", tmp_path / "ours", **loops)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.config.intermediate_size == case["intermediate_dim"]
    assert torch.equal(logits_of(model), logits_of(from_official(weights, case)))
    assert "models" not in sys.modules


def test_a_loopformer_checkpoint_without_a_loop_count_asks_for_it(tmp_path):
    write_loopformer(tmp_path / "official")
    with pytest.raises(ConfigError, match=r"does not say how many loops.*num_loops=8"):
        convert_checkpoint(tmp_path / "official", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("missing", ["lm_head.weight", "transformer.wte.weight", None])
@pytest.mark.parametrize("prefix", ["", "gpt.", "model.", "module.", "_orig_mod.module."])
def test_hub_folders_convert_whatever_the_prefix_and_whichever_tied_name_is_missing(prefix, missing, tmp_path):
    case, weights = golden("lf_loopformer")
    expected = logits_of(from_official(weights, case))
    stored = weights | {"lm_head.weight": weights["transformer.wte.weight"].clone()}
    stored.pop(missing, None)
    (tmp_path / "hub").mkdir()
    save_file(prefixed(stored, prefix), tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text(json.dumps({**case, "model_type": "loopformer", "kind": None}))
    convert_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert torch.equal(logits_of(LoopedForCausalLM.from_pretrained(tmp_path / "ours")), expected)


def test_shards_of_a_hub_folder_are_read_together(tmp_path):
    case, weights = golden("lf_tmlt")
    names = sorted(weights)
    for i, part in enumerate((names[:5], names[5:])):
        save_file({n: weights[n] for n in part}, tmp_path / f"model-0000{i + 1}-of-00002.safetensors")
    state_dict, said = read_official(tmp_path)
    assert said == {}
    assert torch.equal(logits_of(from_official(state_dict, case)), logits_of(from_official(weights, case)))


def test_the_newest_step_of_a_folder_is_taken_and_a_file_names_its_own(tmp_path):
    write_flt(tmp_path / "official", "flt_FLT", step=9)
    write_flt(tmp_path / "later", "flt_LT_i", step=120)
    for file in (tmp_path / "later").iterdir():
        shutil.move(file, tmp_path / "official" / file.name)
    assert read_official(tmp_path / "official")[1]["model_type"] == "LT_i"
    assert read_official(tmp_path / "official" / "model_000009.pt")[1]["model_type"] == "FLT"


def test_a_tokenizer_is_put_beside_the_weights(tmp_path):
    from transformers import AutoTokenizer

    from loopformers.data.tokenizer import BUNDLED_TOKENIZER_DIR

    write_flt(tmp_path / "official")
    convert_checkpoint(tmp_path / "official", tmp_path / "ours", tokenizer=BUNDLED_TOKENIZER_DIR)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) == 2048


# -- what is refused, and leaves nothing behind ----------------------------------------------------------------


class Hostile:
    """Pickles to an instruction that would leave a file behind."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def check_refused(tmp_path, source, error, match, **arguments):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(error, match=match):
        convert_checkpoint(source, tmp_path / "ours", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("where", ["ckpt.pt", "model_000001.pt", "plain"])
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(where, tmp_path):
    """Fault 27."""
    marker, file = tmp_path / "executed", tmp_path / ("model_000002.pt" if where == "plain" else where)
    if where == "plain":
        file.write_bytes(pickle.dumps({"model": Hostile(marker)}))
    else:
        torch.save({"model": golden("lf_tmlt")[1], "config": Hostile(marker)}, file)
    check_refused(tmp_path, file, CheckpointError, f"{file.name} cannot be opened as plain weights.*would execute code")
    assert not marker.exists()


@pytest.mark.parametrize("kept", [0, 10, 1000, -20])
def test_truncated_files_are_refused(kept, tmp_path):
    write_flt(tmp_path / "official")
    file = tmp_path / "official" / "model_000120.pt"
    file.write_bytes(file.read_bytes()[:kept])
    check_refused(tmp_path, tmp_path / "official", CheckpointError, "model_000120.pt cannot be opened.*truncated")
    weights = golden("lf_tmlt")[1]
    save_file(weights, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:kept])
    check_refused(
        tmp_path, tmp_path / "model.safetensors", CheckpointError, "not a readable safetensors file.*truncated"
    )


def test_foreign_files_and_folders_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    check_refused(tmp_path, tmp_path / "empty", CheckpointError, "neither model_.*ckpt.pt nor .*safetensors")
    check_refused(tmp_path, tmp_path / "nowhere", CheckpointError, "nowhere does not exist")
    torch.save([torch.zeros(2)], tmp_path / "ckpt.pt")
    check_refused(tmp_path, tmp_path / "ckpt.pt", CheckpointError, "holds a list, not a state dict")
    torch.save({"epoch": 3}, tmp_path / "ckpt.pt")
    check_refused(tmp_path, tmp_path / "ckpt.pt", CheckpointError, "holds no state dict")
    save_file({"encoder.weight": torch.zeros(3, 2)}, tmp_path / "bert.safetensors")
    case = golden("lf_tmlt")[0]
    check_refused(tmp_path, tmp_path / "bert.safetensors", CheckpointError, "'encoder.weight' maps to no", case=case)
    check_refused(tmp_path, tmp_path / "bert.safetensors", ConfigError, "neither model_type .* nor kind .*add one")


def broken_weights(name, change):
    case, weights = golden(name)
    change(weights)
    return case, weights


BROKEN = {
    "left over": (
        lambda w: w.update({"transformer.h.2.attn.c_q.weight": torch.zeros(32, 32)}),
        "maps to model.layers.2",
    ),
    "unknown": (lambda w: w.update({"transformer.extra": torch.zeros(2)}), "'transformer.extra' maps to no parameter"),
    "not finite": (
        lambda w: w["transformer.h.1.mlp.c_fc.weight"].fill_(float("nan")),
        r"'transformer\.h\.1\.mlp\.c_fc\.weight' holds values that are not finite",
    ),
    "missing": (lambda w: w.pop("transformer.h.1.mlp.c_fc.weight"), r"lacks 1 parameters.*layers\.1\.mlp\.up_proj"),
    "shape": (
        lambda w: w.update({"lm_head.weight": torch.zeros(128, 31)}),
        r"'lm_head.weight' of shape \(128, 31\) does not fit lm_head.weight, which has shape \(80, 32\)",
    ),
    "twice": (lambda w: w.update({"module.lm_head.weight": w["lm_head.weight"]}), "once more under another prefix"),
    "rows": (
        lambda w: w.update({"transformer.wte.weight": torch.zeros(70, 32), "lm_head.weight": torch.zeros(70, 32)}),
        "70 rows for a vocabulary of 80",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_nothing_is_left_over_on_either_side(kind, tmp_path):
    change, match = BROKEN[kind]
    case, weights = broken_weights("flt_FLT", change)
    case = {key: value for key, value in case.items() if key != "padded_vocab_size"}
    with pytest.raises(CheckpointError, match=match):
        from_official(weights, case)
    torch.save(weights, tmp_path / "model_000001.pt")
    check_refused(tmp_path, tmp_path / "model_000001.pt", CheckpointError, match, case=case)


def test_a_joint_matrix_that_does_not_split_and_an_untied_head_are_refused():
    case, weights = golden("lf_loopformer")
    name = "transformer.h.blocks.0.attn.c_attn.weight"
    with pytest.raises(CheckpointError, match="does not split into 3 parts"):
        from_official(weights | {name: weights[name][:-1]}, case)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from transformer.wte.weight.*ties them"):
        from_official(weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1}, case)


@pytest.mark.parametrize(
    ("name", "fields", "error", "match"),
    [
        ("flt_FLT", {"model_type": "FTL"}, ConfigError, "model_type='FTL' is not known; did you mean 'FLT'"),
        ("flt_FLT", {"n_embd": None}, ConfigError, "lacks 'n_embd'"),
        ("flt_FLT", {"n_head": 5}, ConfigError, "hidden_size=32 does not split into num_attention_heads=5"),
        ("flt_FLT", {"n_layer": "two"}, ConfigError, "another type.*'two'"),
        ("flt_FLT", {"K": []}, ConfigError, "another type"),
        ("flt_FLT", {"n_layer": 3}, CheckpointError, "lacks 6 parameters"),
        ("flt_FLT", {"n_embd": 48}, CheckpointError, "does not fit"),
        ("flt_FLT", {"attn_type": "mla"}, CheckpointError, "maps to model.layers.0.self_attn.k_proj.weight"),
        ("lf_loopformer", {"kind": "looped"}, ConfigError, "kind='looped' is not known"),
        ("lf_loopformer", {"kind": "tmlt"}, CheckpointError, "dt_embedder.*another system"),
        ("lf_loopformer", {"kind": "base_loop"}, CheckpointError, "is the case of another system or size"),
        ("lf_tmlt", {"kind": "loopformer"}, CheckpointError, "lacks 4 parameters.*step_embedder"),
        ("lf_tmlt", {"loops": 0}, ConfigError, "another type.*loops=0"),
        ("flt_FLT", {"n_layer": float("inf")}, ConfigError, "another type.*n_layer=inf"),
        ("flt_FLT", {"n_layer": 1000}, CheckpointError, "n_layer=1000 and the checkpoint holds"),
        ("flt_FLT", {"n_embd": 1e30}, ConfigError, "another type.*n_embd=1e"),
        ("flt_FLT", {"n_embd": 2**31}, ConfigError, "another type.*n_embd=2147483648"),
        ("flt_FLT", {"n_embd": 2**30, "vocab_size": 2**30}, CheckpointError, "80|rows are fewer|does not fit"),
        ("flt_FLT", {"n_head": True}, ConfigError, "another type.*n_head=True"),
        ("flt_FLT", {"K": [2, "x"]}, ConfigError, "another type"),
        ("flt_FLT", {"rope_base": "x"}, ConfigError, "rope_base='x'"),
        ("flt_FLT", {"logit_softcap": -3}, ConfigError, "logit_softcap=-3"),
        ("flt_FLT", {"model_type": ["FLT"]}, ConfigError, "is not known"),
        ("flt_FLT", {"sequence_len": "9" * 999}, ConfigError, "another type"),
        ("lf_loopformer", {"kind": 5}, ConfigError, "kind=5 is not known"),
        ("lf_loopformer", {"intermediate_dim": 7.5}, ConfigError, "intermediate_dim=7.5"),
    ],
)
def test_a_wrong_case_is_refused(name, fields, error, match):
    case, weights = golden(name)
    with pytest.raises(error, match=match):
        from_official(weights, {**case, **fields})


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_config": 3}', "[" * 99999, '{"model_config": []}'])
def test_an_unreadable_description_is_refused(content, tmp_path):
    write_flt(tmp_path / "official")
    (tmp_path / "official" / "meta_000120.json").write_text(content)
    check_refused(tmp_path, tmp_path / "official", CheckpointError, "meta_000120.json .*it describes model_000120.pt")


def test_an_existing_destination_is_kept_unless_it_is_to_be_replaced(tmp_path):
    write_flt(tmp_path / "official")
    convert_checkpoint(tmp_path / "official", tmp_path / "ours")
    weights = tmp_path / "ours" / "model.safetensors"
    before = weights.stat().st_ino
    with pytest.raises(CheckpointError, match="ours exists already; choose another folder, or overwrite it"):
        convert_checkpoint(tmp_path / "official", tmp_path / "ours")
    (tmp_path / "official" / "meta_000120.json").unlink()
    with pytest.raises(ConfigError):
        convert_checkpoint(tmp_path / "official", tmp_path / "ours", overwrite=True)
    assert weights.stat().st_ino == before
    convert_checkpoint(tmp_path / "official", tmp_path / "ours", overwrite=True, case=golden("flt_FLT")[0])
    assert weights.stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official", "ours"]


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    write_flt(tmp_path / "official")

    def full_disk(self, folder):
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text("{")
        raise OSError("no space left on device")

    monkeypatch.setattr(convert.LoopedForCausalLM, "save_pretrained", full_disk)
    check_refused(tmp_path, tmp_path / "official", OSError, "no space left")


def sparse(weight):
    return weight.to_sparse()


def broadcast(weight):
    """As large as the right one, and one number in the file."""
    return torch.zeros(1).expand(weight.shape)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.int(), "holds torch.int32, and weights are floating point"),
        (lambda w: w > 0, "holds torch.bool"),
        (lambda w: w * float("nan"), "values that are not finite"),
        (lambda w: w.clone().fill_(float("-inf")), "values that are not finite"),
        (lambda w: (w * float("nan")).to(torch.float8_e4m3fn), "values that are not finite"),
        (sparse, "is a sparse or quantised tensor"),
        (broadcast, "is larger than what the file holds of it"),
        (lambda w: w.to(torch.complex64), "holds torch.complex64"),
    ],
)
def test_tensors_that_are_no_weights_are_refused_by_name(change, match, tmp_path):
    case, weights = golden("flt_FLT")
    name = "transformer.h.1.attn.c_q.weight"
    with pytest.raises(CheckpointError, match=match) as caught:
        from_official(weights | {name: change(weights[name])}, case)
    assert name in str(caught.value)


@pytest.mark.parametrize("said", [["n_layer"], "n_layer", 5])
def test_arguments_of_another_type_are_refused(said, tmp_path):
    torch.save({"model": golden("lf_base")[1], "model_args": said}, tmp_path / "ckpt.pt")
    check_refused(tmp_path, tmp_path / "ckpt.pt", CheckpointError, f"holds model_args of type {type(said).__name__}")


@pytest.mark.parametrize("kind", ["compressed", "overlapping"])
def test_an_archive_that_unpacks_to_more_than_it_has_is_refused_before_it_is_read(kind, tmp_path, monkeypatch):
    torch.save({"w": torch.zeros(999_999)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(tmp_path / "model_000001.pt", "w") as bomb:
        for entry in stored.infolist():
            how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
            bomb.writestr(entry.filename, stored.read(entry), compress_type=how)
        if kind == "overlapping":
            twice = next(entry for entry in bomb.filelist if entry.file_size > 999_999)
            bomb.filelist.append(twice)
            bomb.NameToInfo["archive/data/1"] = twice
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was opened"))
    check_refused(
        tmp_path, tmp_path / "model_000001.pt", CheckpointError, "unpacks to .* bytes and has .* never compresses"
    )


def test_a_header_of_gigabytes_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2**35).to_bytes(8, "little") + b"{}")
    check_refused(tmp_path, tmp_path / "model.safetensors", CheckpointError, "is not a readable safetensors file")


def test_no_error_advises_to_trust_a_hostile_pickle(tmp_path):
    (tmp_path / "ckpt.pt").write_bytes(pickle.dumps({"model": os.system}))
    with pytest.raises(CheckpointError, match="would execute code") as caught:
        read_official(tmp_path / "ckpt.pt")
    assert "weights_only" not in str(caught.value)
