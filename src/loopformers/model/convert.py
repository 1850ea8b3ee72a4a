"""Official checkpoints: read both papers' files, rename their parameters by a table, and write our format.

Nothing of a file is executed: pickles are opened with `weights_only=True`, and the configuration classes that LoopFormer's
files name are answered by a plain stand-in. Nothing is left over: each tensor has exactly one place, and each place gets one.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from loopformers.errors import CheckpointError, ConfigError, LoopformersError, unknown_name
from loopformers.model.config import LoopConfig
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.model.tokenizer import open_tokenizer
from loopformers.model.weight_files import check_finite

__all__ = ["convert_checkpoint", "from_official", "official_config", "read_official"]

Rules = Sequence[tuple[str, str | tuple[str, ...]]]

FLT_SYSTEMS = {"LT": "lt", "LT_i": "lt-input", "LT_ia": "lt-query", "FLT_res": "flt-residual", "FLT": "flt"}
LOOPFORMER_SYSTEMS = {"base": "base", "base_loop": "base-loop", "tmlt": "tmlt", "loopformer": "loopformer"}
LOOPFORMER_FIELDS = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "intermediate_dim", "loops")
"""Fields of the LoopFormer family's constructors that shape a model."""

FLT_RULES: Rules = [
    (r"transformer\.wte\.weight", "model.embed_tokens.weight"),
    (r"lm_head\.weight", "lm_head.weight"),
    (r"transformer\.h\.(\d+)\.attn\.c_(q|k|v)\.weight", r"model.layers.\1.self_attn.\2_proj.weight"),
    (r"transformer\.h\.(\d+)\.attn\.c_proj\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (r"transformer\.h\.(\d+)\.attn\.c_kv_down\.weight", r"model.layers.\1.self_attn.kv_down_proj.weight"),
    (r"transformer\.h\.(\d+)\.attn\.c_(k|v)_up\.weight", r"model.layers.\1.self_attn.\2_up_proj.weight"),
    (r"transformer\.h\.(\d+)\.mlp\.c_fc\.weight", r"model.layers.\1.mlp.up_proj.weight"),
    (r"transformer\.h\.(\d+)\.mlp\.c_proj\.weight", r"model.layers.\1.mlp.down_proj.weight"),
]
"""Official name -> ours."""

_BLOCK = r"transformer\.h\.(?:blocks\.)?(\d+)\."
LOOPFORMER_RULES: Rules = [
    (r"transformer\.wte\.weight", "model.embed_tokens.weight"),
    (r"transformer\.wpe\.weight", "model.embed_positions.weight"),
    (r"transformer\.norm_f\.weight", "model.norm.weight"),
    (r"lm_head\.weight", "lm_head.weight"),
    (
        _BLOCK + r"attn\.c_attn\.weight",  # queries, keys and values in one matrix, one below the other
        tuple(rf"model.layers.\1.self_attn.{part}_proj.weight" for part in "qkv"),
    ),
    (_BLOCK + r"attn\.c_proj\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (_BLOCK + r"mlp\.c_fc\.weight", r"model.layers.\1.mlp.up_proj.weight"),
    (_BLOCK + r"mlp\.c_proj\.weight", r"model.layers.\1.mlp.down_proj.weight"),
    (_BLOCK + r"norm_1\.weight", r"model.layers.\1.input_layernorm.weight"),
    (_BLOCK + r"norm_2\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (_BLOCK + r"adaLN_modulation\.1\.(weight|bias)", r"model.conditioning.modulation.\1.\2"),
    (r"time_embedder\.mlp\.(\d)\.(weight|bias)", r"model.conditioning.time_embedder.\1.\2"),
    (r"dt_embedder\.mlp\.(\d)\.(weight|bias)", r"model.conditioning.step_embedder.\1.\2"),
]

WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|model\.|gpt\.)+")
"""Prefixes that compilation, data parallelism and hub releases put before every name."""


def from_official(state_dict: Mapping[str, Tensor], case: Mapping[str, Any]) -> LoopedForCausalLM:
    """Return our model with the weights of an official one.

    Args:
        state_dict: Official parameters by name; wrapping prefixes are taken off, a tied head may be missing.
        case: The official constructor's fields: `model_type`, `n_layer`, `n_embd` .. for the FLT family (`K` is T, the
            largest where several are listed), `kind`, `n_layer`, `loops` .. for the LoopFormer family.

    Raises:
        CheckpointError: A tensor without a place, a place without a tensor, a shape that does not fit, or a number that is not
            finite.
        ConfigError: A case that lacks a field or holds an illegal one.
    """
    weights = _unwrap(state_dict)
    config = official_config(case, weights)
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=True)}
    if config.tie_word_embeddings:
        weights = _untie_names(weights)
    for name in ("transformer.wte.weight", "lm_head.weight"):  # rows of padding stand for no token
        if name in weights and weights[name].shape == (config.padded_vocab_size, config.hidden_size):
            weights[name] = weights[name][: config.vocab_size]
    ours = _rename(weights, FLT_RULES if _is_flt(case) else LOOPFORMER_RULES, expected)
    model.load_state_dict(ours, strict=False, assign=True)
    model.tie_weights()
    check_finite("the official checkpoint", model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def official_config(case: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LoopConfig:
    """Return the configuration of an official model; fields that its files leave out are read off the weights.

    Raises:
        ConfigError: A field is missing or illegal.
    """
    try:
        return _flt_config(case, weights) if _is_flt(case) else _loopformer_config(case, weights)
    except LoopformersError:
        raise
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"the case holds a field of another type than the official constructor's: {error}") from error


def read_official(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read an official checkpoint: its parameters, and what it says of its constructor's fields.

    Args:
        path: FLT's `model_000123.pt`, or the folder that holds it and `meta_000123.json` (the newest is taken);
            LoopFormer's `ckpt.pt`; a safetensors file, or a folder that holds one or several. Optimiser files are left
            alone.

    Raises:
        CheckpointError: Missing, truncated or foreign file, or one that would execute code.
    """
    files = _find_weights(Path(path))
    payload: dict[str, Any] = {}
    for file in files:
        payload |= _read_weights(file)
    case: dict[str, Any] = {}
    if "model" in payload and isinstance(payload["model"], Mapping):
        case = {**dict(payload.get("model_args") or {}), **_kind_of(payload.get("config"))}
        payload = dict(payload["model"])
    case |= _read_case(files[0])
    if not payload or not all(isinstance(value, Tensor) for value in payload.values()):
        raise CheckpointError(f"{path} holds no state dict (names and tensors); give a checkpoint of FLT or LoopFormer")
    return payload, case


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    case: Mapping[str, Any] | None = None,
    num_loops: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> LoopConfig:
    """Convert an official checkpoint into a folder that `from_pretrained` opens.

    Args:
        source: See `read_official`.
        destination: Folder to write; it appears complete or not at all.
        case: Constructor's fields that the checkpoint does not say, or says wrong.
        num_loops: T, where neither the checkpoint nor the case says it (LoopFormer's files do not).
        tokenizer: Folder of a tokenizer to put beside the weights.
        overwrite: Replace an existing destination.

    Raises:
        CheckpointError: See `read_official` and `from_official`; or the destination exists.
        ConfigError: A field is missing or illegal.
    """
    target = Path(destination)
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already; choose another folder, or overwrite it explicitly")
    state_dict, said = read_official(source)
    fields = {**said, **(case or {})}
    if num_loops is not None:
        fields["K" if _is_flt(fields) else "loops"] = num_loops
    model = from_official(state_dict, fields)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        aside = Path(scratch) / "converted"
        model.save_pretrained(aside)
        if tokenizer is not None:
            open_tokenizer(tokenizer).save_pretrained(aside)
        if target.exists():
            os.replace(target, Path(scratch) / "replaced")
        os.replace(aside, target)
    return model.config


# -- configurations ----------------------------------------------------------------------------------------------


def _is_flt(case: Mapping[str, Any]) -> bool:
    if "model_type" in case:
        return True
    if "kind" in case:
        return False
    raise ConfigError(
        "the case says neither model_type (FLT family: "
        f"{', '.join(FLT_SYSTEMS)}) nor kind (LoopFormer family: {', '.join(LOOPFORMER_SYSTEMS)}); add one of them"
    )


def _field(case: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if case.get(name) is not None:
            return case[name]
    raise ConfigError(f"the case lacks {names[0]!r}, a field of the official constructor; add it")


def _flt_config(case: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LoopConfig:
    system = case["model_type"]
    if system not in FLT_SYSTEMS:
        raise ConfigError(unknown_name("model_type", system, FLT_SYSTEMS))
    loops = _field(case, "K", "loops")
    vocab_size = int(_field(case, "vocab_size"))
    embedding = weights.get("transformer.wte.weight")
    padded = int(case.get("padded_vocab_size") or (len(embedding) if embedding is not None else vocab_size))
    attention: dict[str, Any] = {}
    if case.get("attn_type", "full") == "mla":
        attention["kv_lora_rank"] = int(_field(case, "kv_lora_rank"))
    pattern = str(case.get("window_pattern") or "L").upper()
    if "S" in pattern:
        sizes = [int(size[0]) for size in case.get("window_sizes") or [] if int(size[0]) > 0]
        attention |= {
            "window_pattern": pattern,
            "sliding_window": sizes[0] if sizes else int(_field(case, "sequence_len")) // 4,
        }
    return LoopConfig.from_preset(
        FLT_SYSTEMS[system],
        vocab_size=vocab_size,
        pad_vocab_size_multiple=_padding_multiple(vocab_size, padded),
        hidden_size=int(_field(case, "n_embd")),
        num_hidden_layers=int(_field(case, "n_layer")),
        num_loops=int(max(loops) if isinstance(loops, Sequence) else loops),
        num_attention_heads=int(_field(case, "n_head")),
        num_key_value_heads=int(case.get("n_kv_head") or case["n_head"]),
        max_position_embeddings=int(_field(case, "sequence_len")),
        rope_theta=float(case.get("rope_base") or 10000),
        rope_table_dtype=case.get("rope_tables") or "bfloat16",
        final_logit_softcapping=float(case.get("logit_softcap") or 15),
        **attention,
    )


def _padding_multiple(vocab_size: int, padded: int) -> int | None:
    if padded == vocab_size:
        return None
    for multiple in (64, 128, padded):  # theirs is 64; a file padded otherwise keeps its rows all the same
        if -(-vocab_size // multiple) * multiple == padded:
            return multiple
    raise CheckpointError(f"an embedding of {padded} rows for a vocabulary of {vocab_size}: rows are fewer than tokens")


def _loopformer_config(case: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LoopConfig:
    kind = case["kind"]
    if kind not in LOOPFORMER_SYSTEMS:
        raise ConfigError(unknown_name("kind", kind, LOOPFORMER_SYSTEMS))
    if kind != "base" and case.get("loops") is None:
        raise ConfigError(
            "the checkpoint does not say how many loops it was trained with; give it: num_loops=8 for a 3 x 8 model, say"
        )
    up = next((w for name, w in weights.items() if name.endswith("mlp.c_fc.weight")), None)
    intermediate = case.get("intermediate_dim") or case.get("intermediate_size") or (None if up is None else len(up))
    return LoopConfig.from_preset(
        LOOPFORMER_SYSTEMS[kind],
        vocab_size=int(_field(case, "vocab_size")),
        hidden_size=int(_field(case, "n_embd")),
        intermediate_size=int(_field({"intermediate_dim": intermediate}, "intermediate_dim")),
        num_hidden_layers=int(_field(case, "n_layer")),
        num_loops=1 if kind == "base" else int(case["loops"]),
        num_attention_heads=int(_field(case, "n_head")),
        max_position_embeddings=int(_field(case, "block_size")),
        modulation_init="normal",
    )


# -- names -------------------------------------------------------------------------------------------------------


def _unwrap(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        bare = WRAPPERS.sub("", name)
        if bare in weights:
            raise CheckpointError(f"{name!r} is {bare!r} once more under another prefix; keep one of them")
        weights[bare] = tensor
    return weights


def _untie_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep one name for a tied matrix: head and embedding are the same, and either may be missing."""
    tied = dict(weights)
    head = tied.pop("lm_head.weight", None)
    if head is not None:
        embedding = tied.setdefault("transformer.wte.weight", head)
        if embedding.shape != head.shape or not torch.equal(embedding, head):
            raise CheckpointError("lm_head.weight differs from transformer.wte.weight, and this model ties them")
    return tied


def _rename(theirs: Mapping[str, Tensor], rules: Rules, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        targets = [match.expand(t) for match, t in _targets(name, rules)]
        unknown = [t for t in targets if t not in expected or t in ours]
        if not targets or unknown:
            raise CheckpointError(
                f"{name!r} maps to {', '.join(unknown) or 'no parameter'} of this model; is the case of another system or size?"
            )
        if tensor.dim() == 0 or len(tensor) % len(targets):
            raise CheckpointError(f"{name!r} of shape {tuple(tensor.shape)} does not split into {len(targets)} parts")
        for target, part in zip(targets, tensor.chunk(len(targets)), strict=True):
            if tuple(part.shape) != expected[target]:
                raise CheckpointError(
                    f"{name!r} of shape {tuple(tensor.shape)} does not fit {target}, which has shape {expected[target]}"
                )
            ours[target] = part.detach().to(torch.float32).contiguous().clone()
    if missing := sorted(expected.keys() - ours.keys()):
        raise CheckpointError(f"the checkpoint lacks {len(missing)} parameters, the first: {', '.join(missing[:3])}")
    return ours


def _targets(name: str, rules: Rules) -> list[tuple[re.Match[str], str]]:
    found = []
    for pattern, target in rules:
        if match := re.fullmatch(pattern, name):
            found += [(match, part) for part in ((target,) if isinstance(target, str) else target)]
    return found


# -- files -------------------------------------------------------------------------------------------------------


def _find_weights(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give a checkpoint file or the folder that holds it")
    for pattern in ("model_*.pt", "ckpt.pt"):
        if found := sorted(path.glob(pattern)):
            return found[-1:]
    if shards := sorted(path.glob("*.safetensors")):
        return shards
    raise CheckpointError(f"{path} holds neither model_*.pt, ckpt.pt nor *.safetensors; give the checkpoint file")


def _read_weights(file: Path) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        try:
            return dict(load_file(file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is no readable safetensors file, perhaps truncated: {error}") from error
    stand_ins: list[Any] = [
        (type("GPTConfig", (_StandIn,), {"official_kind": kind}), f"models.{kind}.GPTConfig")
        for kind in LOOPFORMER_SYSTEMS
    ]
    try:
        with torch.serialization.safe_globals(stand_ins):
            payload = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated or hostile pickle raises anything
        raise CheckpointError(
            f"{file} cannot be opened as plain weights, so it is truncated, foreign, or would execute code: {error}"
        ) from error
    if not isinstance(payload, Mapping):
        raise CheckpointError(f"{file} holds a {type(payload).__name__}, not a state dict")
    return dict(payload)


class _StandIn:
    """Takes the place of a configuration class that a checkpoint names: it holds fields and does nothing."""

    official_kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


def _kind_of(config: Any) -> dict[str, Any]:
    if not isinstance(config, _StandIn):
        return {}
    fields = {name: value for name, value in vars(config).items() if value is not None and not callable(value)}
    return {**fields, "kind": config.official_kind}


def _read_case(file: Path) -> dict[str, Any]:
    """Read the constructor's fields from the JSON file beside the weights, where there is one.

    FLT: `model_config` of the meta_*.json of the same step. Hub releases: the fields in config.json that are ours to know.
    """
    if step := re.fullmatch(r"model_(\d+)\.pt", file.name):
        description = file.with_name(f"meta_{step[1]}.json")
    elif file.suffix == ".safetensors":
        description = file.with_name("config.json")
    else:
        return {}
    if not description.exists():
        return {}
    try:
        fields = json.loads(description.read_text())
        if step:
            return dict(fields["model_config"])
        kind = {"kind": fields["model_type"]} if fields.get("model_type") in LOOPFORMER_SYSTEMS else {}
        return kind | {name: fields[name] for name in LOOPFORMER_FIELDS if fields.get(name) is not None}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{description} is no readable description of {file.name}: {error!r}") from error
