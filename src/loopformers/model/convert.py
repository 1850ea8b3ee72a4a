"""Official checkpoints: read both papers' files, rename their parameters by a table, and write our format.

Nothing of a file is executed: pickles are opened with `weights_only=True`, and the configuration classes that LoopFormer's
files name are answered by a plain stand-in. Nothing is left over: each tensor has exactly one place, and each place gets one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from loopformers.errors import CheckpointError, ConfigError, LoopformersError, first_line, shorten, unknown_name
from loopformers.files import writing
from loopformers.limits import MAX_COUNT
from loopformers.model.config import LoopConfig
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.model.official_files import LOOPFORMER_SYSTEMS, read_official
from loopformers.model.replacing import replaced_folder
from loopformers.model.tokenizer import open_tokenizer

__all__ = ["convert_checkpoint", "from_official", "official_config", "read_official"]

Rules = Sequence[tuple[str, str | tuple[str, ...]]]

FLT_SYSTEMS = {"LT": "lt", "LT_i": "lt-input", "LT_ia": "lt-query", "FLT_res": "flt-residual", "FLT": "flt"}
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

MANY_LAYERS = 256

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
    if not isinstance(state_dict, Mapping) or not isinstance(case, Mapping):
        raise ConfigError(
            f"a {type(state_dict).__name__} and a {type(case).__name__} are no checkpoint; give official parameters by name, and "
            "the fields of the official constructor"
        )
    weights = _unwrap(state_dict)
    config = official_config(case, weights)
    if config.num_hidden_layers > max(len(weights), MANY_LAYERS):  # not even built, as that would take minutes
        raise CheckpointError(
            f"the case says n_layer={config.num_hidden_layers} and the checkpoint holds {len(weights)} tensors, fewer than one a "
            "layer; give the case of this checkpoint"
        )
    try:
        with torch.device("meta"):
            model = LoopedForCausalLM(config)
    except (RuntimeError, OverflowError) as error:  # a matrix of more bytes than can be counted
        raise ConfigError(
            f"the case describes a model that is too large to exist ({first_line(error)}); give the case of this checkpoint"
        ) from error
    expected = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=True)}
    if config.tie_word_embeddings:
        weights = _untie_names(weights)
    for name in ("transformer.wte.weight", "lm_head.weight"):  # rows of padding stand for no token
        if name in weights and weights[name].shape == (config.padded_vocab_size, config.hidden_size):
            weights[name] = weights[name][: config.vocab_size]
    ours = _rename(weights, FLT_RULES if _is_flt(case) else LOOPFORMER_RULES, expected)
    model.load_state_dict(ours, strict=False, assign=True)
    model.tie_weights()
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
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise ConfigError(f"the case holds a field of another type than the official constructor's: {error}") from error


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
        overwrite: Replace a model that is there; nothing else is ever replaced.

    Raises:
        CheckpointError: See `read_official` and `from_official`; or the destination exists and may not be replaced.
        ConfigError: A field is missing or illegal, or another process is writing there.
        WriteError: The destination cannot be written.
    """
    with replaced_folder(destination, source, overwrite=overwrite) as aside:
        state_dict, said = read_official(source)
        fields = {**said, **(case or {})}
        if num_loops is not None:
            fields["K" if _is_flt(fields) else "loops"] = num_loops
        model = from_official(state_dict, fields)
        with writing(destination, SafetensorError):
            model.save_pretrained(aside)
        if tokenizer is not None:
            opened = open_tokenizer(tokenizer)
            with writing(destination):
                opened.save_pretrained(aside)
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


def _whole(case: Mapping[str, Any], *names: str) -> int:
    """Return a field that counts something.

    Raises:
        ConfigError: It is missing, no whole number, or larger than any model.
    """
    return _as_count(names[0], _field(case, *names))


def _as_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ConfigError(
            f"the case holds a field of another type than the official constructor's: {name}={shorten(value)}; it must be a "
            f"whole number from 1 to {MAX_COUNT:,}"
        )
    return value


def _positive(case: Mapping[str, Any], name: str, default: float) -> float:
    value = case.get(name) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_COUNT:
        raise ConfigError(
            f"the case holds {name}={shorten(value)}; it must be a number above 0 and at most {MAX_COUNT:,}"
        )
    return float(value)


def _flt_config(case: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LoopConfig:
    system = case["model_type"]
    if not isinstance(system, str) or system not in FLT_SYSTEMS:
        raise ConfigError(unknown_name("model_type", system, FLT_SYSTEMS))
    loops = _field(case, "K", "loops")
    vocab_size = _whole(case, "vocab_size")
    embedding = weights.get("transformer.wte.weight")
    rows = len(embedding) if embedding is not None and embedding.dim() else vocab_size
    padded = _as_count("padded_vocab_size", case.get("padded_vocab_size") or rows)
    attention: dict[str, Any] = {}
    if case.get("attn_type", "full") == "mla":
        attention["kv_lora_rank"] = _whole(case, "kv_lora_rank")
    pattern = str(case.get("window_pattern") or "L").upper()
    if "S" in pattern:
        sizes = [int(size[0]) for size in case.get("window_sizes") or [] if int(size[0]) > 0]
        attention |= {
            "window_pattern": pattern,
            "sliding_window": sizes[0] if sizes else _whole(case, "sequence_len") // 4,
        }
    return LoopConfig.from_preset(
        FLT_SYSTEMS[system],
        vocab_size=vocab_size,
        pad_vocab_size_multiple=_padding_multiple(vocab_size, padded),
        hidden_size=_whole(case, "n_embd"),
        num_hidden_layers=_whole(case, "n_layer"),
        num_loops=_as_count("K", max(loops) if isinstance(loops, list | tuple) else loops),
        num_attention_heads=_whole(case, "n_head"),
        num_key_value_heads=_as_count("n_kv_head", case.get("n_kv_head") or case["n_head"]),
        max_position_embeddings=_whole(case, "sequence_len"),
        rope_theta=_positive(case, "rope_base", 10000),
        rope_table_dtype=case.get("rope_tables") or "bfloat16",
        final_logit_softcapping=_positive(case, "logit_softcap", 15),
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
    if not isinstance(kind, str) or kind not in LOOPFORMER_SYSTEMS:
        raise ConfigError(unknown_name("kind", kind, LOOPFORMER_SYSTEMS))
    if kind != "base" and case.get("loops") is None:
        raise ConfigError(
            "the checkpoint does not say how many loops it was trained with; give it: num_loops=8 for a 3 x 8 model, say"
        )
    up = next((w for name, w in weights.items() if name.endswith("mlp.c_fc.weight")), None)
    intermediate = case.get("intermediate_dim") or case.get("intermediate_size") or (None if up is None else len(up))
    return LoopConfig.from_preset(
        LOOPFORMER_SYSTEMS[kind],
        vocab_size=_whole(case, "vocab_size"),
        hidden_size=_whole(case, "n_embd"),
        intermediate_size=_whole({"intermediate_dim": intermediate}, "intermediate_dim"),
        num_hidden_layers=_whole(case, "n_layer"),
        num_loops=1 if kind == "base" else _whole(case, "loops"),
        num_attention_heads=_whole(case, "n_head"),
        max_position_embeddings=_whole(case, "block_size"),
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
        _check_tensor(name, tensor)
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


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Check that a tensor is what weights are: dense, of floating point, finite, and no larger than its storage."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name!r} is a sparse or quantised tensor, and weights are dense; save it as a dense one"
        )
    if not tensor.is_floating_point():
        raise CheckpointError(f"{name!r} holds {tensor.dtype}, and weights are floating point; give the original file")
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{name!r} of shape {tuple(tensor.shape)} is larger than what the file holds of it; give the original file"
        )
    numbers = tensor if tensor.itemsize > 1 else tensor.to(torch.float32)  # eight bits know no isfinite
    if not numbers.isfinite().all():
        raise CheckpointError(
            f"{name!r} holds values that are not finite, and the model would compute NaN; give an earlier checkpoint"
        )


def _targets(name: str, rules: Rules) -> list[tuple[re.Match[str], str]]:
    found = []
    for pattern, target in rules:
        if match := re.fullmatch(pattern, name):
            found += [(match, part) for part in ((target,) if isinstance(target, str) else target)]
    return found
